"""Common words of languages, and the scale of filters that were made for English.

The lists are short: two words of one list tell prose in that language from lists, tables and code. A text in a script
without a list is not asked for such words.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import Final

from bytescale_ext.data.clean.words import letters_per_word

_LISTS: Final = {
    "LATIN": (
        "the be to of and that have with",
        "der und nicht das mit von auch wird dem sich",
        "les des une dans est pour que qui avec sur",
        "los las una por para que con del más como",
        "il della che per una con sono nel anche degli",
        "uma não para com dos mais como pelo também são",
        "het een van niet voor zijn met ook wordt naar",
        "och att det som inte för med är av till",
        "og ikke til det som med af på er har",
        "ja että ei oli myös hän mutta kun joka ovat",
        "nie jest się przez dla jak oraz ale który jako",
        "není jako pro které také jeho však byl která jsou",
        "egy nem hogy és az van mint volt csak meg",
        "nu este din pentru care sau mai fost sunt prin",
        "bir ve bu için ile olan daha gibi olarak çok",
        "yang dan untuk dengan dari ini pada adalah tidak dalam",
        "của và là có không được trong cho một các",
        "ang ng mga na sa ay hindi para ito kung",
        "na ya wa kwa ni katika za hii kama cha",
    ),
    "CYRILLIC": (
        "и в не на что с он как это по",
        "і та не на що у до як з для",
        "и на да за се от не са като това",
        "и је да на се за су од који није",
    ),
    "GREEK": ("και το να της του με για από είναι που",),
    "ARABIC": (
        "من في على إلى أن هذا التي عن مع كان",
        "و در به از که این را با است برای",
        "کے میں ہے کی اور سے کو نے ہیں پر",
    ),
    "HEBREW": ("של את על לא הוא זה עם כי גם היא",),
    "DEVANAGARI": ("के में है की और से को का यह पर", "आहे आणि या ते हे च्या नाही होते", "छ र मा को यो हो पनि थियो"),
    "BENGALI": ("এবং একটি এই করে থেকে ও যে হয় না তার",),
    "TAMIL": ("மற்றும் ஒரு இந்த என்று அது என இது அவர்",),
    "HANGUL": ("이 그 수 있다 및 것이다 등 또한 하는 그리고 있는 것은",),
    "CJK": ("的 了 是 在 和 有 不 我 这 這 为",),
    "HIRAGANA": ("の は を に が と で た する ます",),
    "THAI": ("ที่ และ ใน ของ เป็น มี ได้ ไม่ จะ การ",),
}  # fmt: skip
STOP_WORDS: Final = {script: tuple(frozenset(words.split()) for words in lists) for script, lists in _LISTS.items()}
_WORD: Final = re.compile(r"[^\W\d_][\w\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0dff\u200c\u200d]*")
_SHOWN: Final = 20_000  # characters that tell the script


def script_of(text: str) -> str:
    """Return the script of most letters of a text by its Unicode name, such as LATIN; "" for a text without letters."""
    if text.isascii():
        return "LATIN"
    letters = Counter(letter for letter in text[:_SHOWN] if letter.isalpha())
    counts: Counter[str] = Counter()
    for letter, count in letters.items():
        counts[unicodedata.name(letter, " ").partition(" ")[0]] += count
    if counts["HIRAGANA"] * 20 > counts.total():  # Japanese is mixed
        return "HIRAGANA"
    return counts.most_common(1)[0][0] if counts else ""


def has_common_words(text: str, least: int) -> bool:
    """Return whether a text has ``least`` common words of a language of its script, or there is no list for it."""
    lists = STOP_WORDS.get(script_of(text))
    if lists is None:
        return True
    if letters_per_word(text) > 1:
        return any(sum(word in text for word in words) >= least for words in lists)
    found = set(_WORD.findall(text.lower())) | set(_WORD.findall(text))
    return any(len(words & found) >= least for words in lists)
