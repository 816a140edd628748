"""Filters and masks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.data.clean.gates import DocumentFilter, quality_filter
from bytescale_ext.data.clean.languages import has_common_words, script_of
from bytescale_ext.data.clean.personal import ADDRESS, ADDRESS_6, EMAIL, KEY, PHONE, PersonalData
from bytescale_ext.data.clean.recipe import FILTERS, Recipe, Source
from bytescale_ext.data.clean.words import letters_per_word
from tests.data.cleaning import document, run_steps, told

PROSE = (
    "The harbour of the old town was built by sailors that have come from the north.\n"
    "It is to be seen with the lighthouse, and ships of many countries anchor in the bay.\n"
    "People say that the water is deep enough for the largest vessels of our time.\n"
    "In winter the storms of the sea reach the walls, but the boats behind them are safe.\n"
    "Children learn to sail here, and the school has boats for all of them to use.\n"
    "Visitors find a museum with maps, anchors, ropes and models of the ships of the past.\n"
)
REFUSED = {
    "gopher-quality": "short of words",
    "gopher-repetition": "The same line again.\n" * 30,
    "c4": PROSE + "int main(void) {\nreturn 0;\n} // a program, with a bracket {.\n",
    "fineweb": "menu\nhome\nabout us\ncontact\n" * 10,
}


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_passes_prose_and_refuses_what_it_is_for(name: str, tmp_path: Path) -> None:
    recipe = Recipe((Source("docs", ".", "text", "*", (name,)),), steps=("filters",))
    gate = DocumentFilter(recipe, tmp_path / "tallies")
    passed = run_steps([lambda *_: iter([document(PROSE, "good"), document(REFUSED[name], "bad")]), gate])
    assert [one.id for one in passed] == ["good"]  # type: ignore[attr-defined]
    ((what, count),) = told(tmp_path).counts["docs"].items()
    assert what.startswith(f"filter {name}: ")
    assert count == 1
    assert told(tmp_path).examples[what][0]["document"] == "bad"


def test_each_source_has_its_own_filters(tmp_path: Path) -> None:
    sources = (Source("docs", ".", "text", "*", ("gopher-quality",)), Source("code", ".", "text", "*", ()))
    short = [document("x = 1", "a"), document("x = 1", "b", "code")]
    gate = DocumentFilter(Recipe(sources, steps=("filters",)), tmp_path / "tallies")
    assert [one.id for one in run_steps([lambda *_: iter(short), gate])] == ["b"]  # type: ignore[attr-defined]
    off = DocumentFilter(Recipe(sources, steps=("pii",)), tmp_path / "tallies")
    assert len(run_steps([lambda *_: iter(short), off])) == 2


def test_addresses_are_masked(tmp_path: Path) -> None:
    recipe = Recipe((Source("docs", ".", "text", "*", ()),), steps=("pii",))
    body = "Write to jane.doe@corp.example.net and ann@b.org, or ping 8.8.8.8, not 10.0.0.1 or 127.0.0.1."
    found = run_steps(
        [lambda *_: iter([document(body), document("nothing", "b")]), DocumentFilter(recipe, tmp_path / "tallies")]
    )
    expected = f"Write to {EMAIL} and {EMAIL}, or ping {ADDRESS}, not 10.0.0.1 or 127.0.0.1."
    assert [one.text for one in found] == [expected, "nothing"]  # type: ignore[attr-defined]
    assert told(tmp_path).counts == {"docs": {"masked": 1}}
    assert EMAIL in str(told(tmp_path).examples["masked"][0]["text"])


def test_filters_come_in_their_order_and_see_what_the_one_before_left(tmp_path: Path) -> None:
    """C4 removes lines, and the next filter judges the remaining text."""
    recipe = Recipe((Source("docs", ".", "text", "*", ("c4", "fineweb")),), steps=("filters",))
    menu = "menu\nhome\nabout us\ncontact\nlanguage\n" * 5
    passed = run_steps(
        [lambda *_: iter([document(menu + PROSE, "page")]), DocumentFilter(recipe, tmp_path / "tallies")]
    )
    assert [one.text for one in passed] == [PROSE.strip()]  # type: ignore[attr-defined]
    alone = Recipe((Source("docs", ".", "text", "*", ("fineweb",)),), steps=("filters",))
    gate = DocumentFilter(alone, tmp_path / "alone" / "tallies")
    assert run_steps([lambda *_: iter([document(menu + PROSE, "page")]), gate]) == []
    assert told(tmp_path / "alone").counts["docs"] == {"filter fineweb: short_line_ratio": 1}


MASKED = {
    "请联系zhangwei@163.com谢谢": f"请联系{EMAIL}谢谢",
    "user12.name@x.com": EMAIL,
    "联系user12.name@x.com。": f"联系{EMAIL}。",
    "<a.b+c-d@mail.x-y.co.uk>, (e_f@g.io)": f"<{EMAIL}>, ({EMAIL})",
    "...jane@x.com... and": f"...{EMAIL}... and",
    "müller@straße.de und почта@пример.рф": f"{EMAIL} und {EMAIL}",
    "用户@例子.公司": EMAIL,
    "a@[8.8.8.8] b": f"{EMAIL} b",
    "no @mention, a@b, x @ y.com": "no @mention, a@b, x @ y.com",
    "server 2606:4700:4700::1111.": f"server {ADDRESS_6}.",
    "2A00:1450:4001:082A:0000:0000:0000:200E!": f"{ADDRESS_6}!",
    "[2606:4700:4700::64]:443": f"[{ADDRESS_6}]:443",
    "地址2606:4700::6810:85e5在": f"地址{ADDRESS_6}在",
    "::1 fe80::1 2001:db8::5 fd00::1 ab::cd std::vector 12:30:45": (
        "::1 fe80::1 2001:db8::5 fd00::1 ab::cd std::vector 12:30:45"
    ),
    "从8.8.8.8到10.0.0.1": f"从{ADDRESS}到10.0.0.1",
}


@pytest.mark.parametrize("text", MASKED)
def test_addresses_in_any_script(text: str) -> None:
    assert PersonalData().masked(text) == MASKED[text]


PHONES = {
    "Call +49 89 1234567 or (415) 555-2671.": f"Call {PHONE} or {PHONE}.",
    "Tel: 030/123456-78, Fax 030 1234579": f"Tel: {PHONE}, Fax {PHONE}",
    "电话：010-12345678。手机13912345678吧": f"电话：{PHONE}。手机{PHONE}吧",
    "ring 415-555-2671 or 0049 89 1234567": f"ring {PHONE} or {PHONE}",
    "2024-05-06, 12:30:45, 3.14159265358979": "2024-05-06, 12:30:45, 3.14159265358979",
    "ISBN 978-3-16-148410-0, 1990-2000, 1,234,567,890": "ISBN 978-3-16-148410-0, 1990-2000, 1,234,567,890",
    "x = a +1234 - 1234567890123; call 12 people": "x = a +1234 - 1234567890123; call 12 people",
}
KEYS = {
    "id AKIAIOSFODNN7EXAMPLE;": f"id {KEY};",
    "ghp_" + 18 * "a1" + " of " + "hf_" + 17 * "bC": f"{KEY} of {KEY}",
    'api_key: "abcd1234efgh5678ijkl90"': f'api_key: "{KEY}"',
    "client_secret = 'changeme'": "client_secret = 'changeme'",
    "a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\nab+/=\n-----END RSA PRIVATE KEY-----\nb": f"a\n{KEY}\nb",
    "-----BEGIN PUBLIC KEY-----\nMIIE\n-----END PUBLIC KEY-----": (
        "-----BEGIN PUBLIC KEY-----\nMIIE\n-----END PUBLIC KEY-----"
    ),
    "a sk-learn and eyJust.text": "a sk-learn and eyJust.text",
}


@pytest.mark.parametrize("text", PHONES | KEYS)
def test_phone_numbers_and_keys(text: str) -> None:
    assert PersonalData().masked(text) == (PHONES | KEYS)[text]


@pytest.mark.slow
def test_long_lines_without_addresses_take_no_time() -> None:
    for text in ("1" * 200_000, "1 " * 100_000, "tel " * 50_000, "12.34-" * 40_000, "api_key='" * 20_000):
        assert PersonalData().masked(text) == text
    for text in ("a" * 200_000 + "@", "a.b-" * 50_000 + "@ x", "联" * 100_000 + " @"):
        assert PersonalData().masked(text) == text


PARAGRAPHS = {
    "Russian": "В начале прошлого века этот город был небольшим портом на севере страны. Сюда приходили корабли с лесом и "
    "зерном, и по вечерам на набережной собирались жители. Сегодня здесь работают заводы, университет и театр, но старая "
    "часть города почти не изменилась. Летом туристы гуляют по узким улицам, а зимой море замерзает, и рыбаки выходят "
    "на лед. Многие говорят, что это лучшее место для отдыха, как и раньше.",
    "German": "Der Hafen der alten Stadt wurde von Seeleuten gebaut, die aus dem Norden kamen. Er ist mit dem Leuchtturm "
    "weithin zu sehen, und Schiffe aus vielen Ländern ankern in der Bucht. Das Wasser ist auch für die größten Schiffe "
    "tief genug. Im Winter erreichen die Stürme die Mauern, aber die Boote dahinter sind sicher. Kinder lernen hier das "
    "Segeln, und die Schule hat nicht nur kleine Boote. Besucher finden ein Museum mit Karten und Ankern.",
    "Chinese": "这座老城的港口是由来自北方的水手建造的。人们在很远的地方就可以看到灯塔，许多国家的船只都在海湾里停泊。据说这里的水很深，"
    "足以容纳我们时代最大的船。冬天，海上的风暴会打到城墙上，但是墙后的小船是安全的。孩子们在这里学习航海，学校为他们准备了船只。"
    "游客可以参观一个博物馆，里面有地图、锚、绳索和过去船只的模型。",
    "Japanese": "この古い町の港は、北から来た船乗りたちによって造られました。灯台は遠くからでもよく見え、多くの国の船が湾に停泊します。"
    "水は今の時代の最も大きな船にも十分な深さがあると言われています。冬には海の嵐が城壁に届きますが、その後ろの小舟は安全です。"
    "子供たちはここで帆走を学び、学校には彼らのための船があります。",
    "Hindi": "पुराने शहर का बंदरगाह उन नाविकों ने बनाया था जो उत्तर से आए थे। प्रकाशस्तंभ के साथ यह दूर से दिखाई देता है और कई देशों के "
    "जहाज खाड़ी में लंगर डालते हैं। लोग कहते हैं कि पानी हमारे समय के सबसे बड़े जहाजों के लिए भी काफी गहरा है। सर्दियों में समुद्र के तूफान दीवारों "
    "तक पहुँचते हैं लेकिन उनके पीछे की नावें सुरक्षित रहती हैं। बच्चे यहाँ नाव चलाना सीखते हैं।",
    "Arabic": "بنى البحارة الذين جاؤوا من الشمال ميناء المدينة القديمة في القرن الماضي. ويمكن رؤية المنارة من مكان بعيد، وترسو "
    "سفن من بلدان كثيرة في الخليج. ويقول الناس إن الماء عميق بما يكفي لأكبر السفن في هذا الزمن. وفي الشتاء تصل عواصف البحر إلى "
    "الأسوار، لكن القوارب التي خلفها آمنة. ويتعلم الأطفال الإبحار هنا، وفي المدرسة قوارب لهم جميعا، كما يجد الزوار متحفا مع خرائط.",
    "Thai": "ท่าเรือของเมืองเก่าสร้างขึ้นโดยกะลาสีที่มาจากทางเหนือ ประภาคารมองเห็นได้จากที่ไกล และเรือจากหลายประเทศจอดทอดสมออยู่ในอ่าว "
    "ผู้คนบอกว่าน้ำลึกพอสำหรับเรือที่ใหญ่ที่สุดในยุคของเรา ในฤดูหนาวพายุจากทะเลพัดมาถึงกำแพง แต่เรือเล็กที่อยู่ด้านหลังปลอดภัย เด็กๆ เรียนแล่นเรือที่นี่",
    "Korean": "오래된 도시의 항구는 북쪽에서 온 선원들이 만들었다. 등대는 멀리서도 보이고 많은 나라의 배가 만에 닻을 내린다. 사람들은 물이 우리 "
    "시대의 가장 큰 배에도 충분히 깊다고 말한다. 겨울에는 바다의 폭풍이 성벽까지 닿지만 그 뒤에 있는 작은 배들은 안전하다. 아이들은 여기에서 "
    "배를 모는 법을 배우고 학교에는 그 모두를 위한 배가 있다. 방문객은 지도와 닻, 밧줄 그리고 옛날 배의 모형이 있는 박물관을 볼 수 있다.",
}  # fmt: skip


@pytest.mark.parametrize("language", PARAGRAPHS)
@pytest.mark.parametrize("name", ["gopher-quality", "gopher-repetition"])
def test_filters_pass_prose_of_other_languages(name: str, language: str) -> None:
    text = PARAGRAPHS[language]
    quality = quality_filter(name, letters_per_word(text), script_of(text))
    assert quality.filter(document(text)) is True
    if letters_per_word(text) == 1 and name == "gopher-quality":
        assert quality.filter(document(text[:100])) == (False, "gopher_short_doc")


@pytest.mark.parametrize("language", ["Chinese", "Thai", "Hindi"])
def test_line_filters_pass_prose_of_other_scripts(language: str) -> None:
    text = PARAGRAPHS[language] * 3
    for name in ("c4", "fineweb"):
        quality = quality_filter(name, letters_per_word(text), script_of(text))
        assert quality.filter(document(text)) is True


def test_lists_without_common_words_are_refused() -> None:
    assert not has_common_words("Menü Startseite Kontakt Impressum Karte " * 20, 2)
    assert not has_common_words("Меню Контакты Карта Главная " * 20, 2)
    assert has_common_words("მენიუ რუკა", 2)  # no list of the language


def test_filters_read_lines_that_end_at_newlines_alone(tmp_path: Path) -> None:
    """C4 writes the lines anew, so a separator that it took for a newline would be lost."""
    recipe = Recipe((Source("docs", ".", "text", "*", FILTERS),), steps=("filters",))
    body = PROSE.strip().replace(" ", "\u2028", 1).replace(" ", "\x0c", 1)
    (passed,) = run_steps([lambda *_: iter([document(body)]), DocumentFilter(recipe, tmp_path / "tallies")])
    assert type(passed.text) is str  # type: ignore[attr-defined]
    assert passed.text == body  # type: ignore[attr-defined]
