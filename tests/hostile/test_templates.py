"""Hostile chat templates: none runs code, and each ends in one line or in documents, within its limits."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.data.samples import template_limits
from bytescale_ext.data.samples.chat_templates import TemplateEncoder
from bytescale_ext.data.samples.chats import Conversation
from bytescale_ext.data.samples.sources import file_entries
from bytescale_ext.data.samples.template_limits import MOST_EXCEEDED
from megatron.bytescale.core.datasets.conversations import Fields, encode_at, write_conversations
from tests.data.chats import chat, write_lines, write_tokenizer
from tests.sample import sampled

SECONDS, BYTES = 0.5, 1 << 28
LONG = 60.0  # where another limit ends a template; a busy machine takes its time
READ = "read"
PLAIN = "{% for m in messages %}{{ m.role }}\n{{ m.content }}<SPECIAL_12>{% endfor %}"
RUN = "os.system('touch {canary}')"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
NESTED = "{% set n = namespace(a=[]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
DOUBLED = "{%% set n = namespace(a=%s) %%}{%% for i in range(60) %%}{%% set n.a = n.a + n.a %%}{%% endfor %%}"
UNSAFE = "is unsafe"
# What stands before a plain template, or after it, and text of its refusal.
TEMPLATES: dict[str, tuple[str, str]] = {
    "class of a text": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", UNSAFE),
    "filter attr": ("{{ ''|attr('__class__')|attr('__mro__') }}", READ),
    "format": ("{{ '{0.__class__.__mro__}'.format('') }}", UNSAFE),
    "format_map": ("{{ '{x.__init__.__globals__}'.format_map({'x': joiner}) }}", UNSAFE),
    "format with a name": ("{% set f = '{0.__init__.__globals__}'.format %}{{ f(joiner) }}", UNSAFE),
    "map of attributes": ("{{ [joiner]|map(attribute='__init__.__globals__')|list }}", UNSAFE),
    "globals of cycler": ("{{ cycler.__init__.__globals__." + RUN + " }}", UNSAFE),
    "globals of lipsum": ("{{ lipsum.__globals__." + RUN + " }}", UNSAFE),
    "globals of raise_exception": ("{{ raise_exception.__globals__." + RUN + " }}", UNSAFE),
    "context": ("{{ self._TemplateReference__context.cycler.__init__ }}", UNSAFE),
    "frame of a generator": ("{% set g = messages|map('upper') %}{{ g.gi_frame.f_back.f_globals }}", UNSAFE),
    "undefined name": ("{{ url_for.__globals__ }}", "undefined"),
    "namespace": ("{% set ns = namespace(**{'__class__': 1}) %}{{ ns._Namespace__attrs }}", "underscore|is unsafe"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}{{ " + RUN + " }}", "no loader"),
    "extends": ("{% extends '/etc/passwd' %}", "no loader"),
    "codec": ("{{ 'x'.encode('zip') }}", "text encoding|encod"),
    "append to messages": ("{% set _ = messages.append(messages[0]) %}", UNSAFE),
    "update of messages": ("{% for m in messages %}{% set _ = m.update({'a': 1}) %}{% endfor %}", UNSAFE),
    "control characters": ("{{ raise_exception('\x1b[31mred\n next') }}", "refuses .*red"),
    "large range": ("{{ range(1000000000)|list }}", "Range too big"),
    "power": ("{% for i in range(10**9) %}{% endfor %}", r"power \(\*\*\)"),
    "method of a power": ("{{ 2.__pow__(9999999999) }}", UNSAFE),
    "nested loops": (LOOPS, "takes longer"),
    "macro of itself": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
    "loop of itself": ("{% for m in [1] recursive %}{{ loop([1]) }}{% endfor %}", "recursion"),
    "macro with two calls": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "takes longer",
    ),
    "long text": ("{{ 'a' * 4000000000 }}", "memory"),
    "width of format": ("{{ '{:>4000000000}'.format('x') }}", "memory"),
    "width of a percent sign": ("{{ '%4000000000d' % 1 }}", "memory"),
    "center": ("{{ 'x'|center(4000000000) }}", "memory"),
    "replace": ("{% set a = 'a' * 100000 %}{{ a|replace('a', a) }}", "memory"),
    "join": ("{% set a = 'a' * 1000000 %}{{ range(99999)|list|join(a) }}", "memory"),
    "doubled text": (DOUBLED % "'aa'", "memory|takes longer"),
    "doubled list": (DOUBLED % "[1]", "memory|takes longer"),
    "squared number": (
        "{% set n = namespace(a=9999999999) %}{% for i in range(64) %}{% set n.a = n.a * n.a %}{% endfor %}",
        "takes longer|memory",
    ),
    "list in a list as JSON": (NESTED + "{{ n.a|tojson }}", "takes longer|memory"),
    "indent of JSON": ("{{ messages|tojson(indent=1000000000) }}", "memory|takes longer"),
    "slices": ("{{ [1]|slice(4000000000)|list }}", "memory|takes longer"),
    "words": ("{{ ('a ' * 10000000)|wordwrap(1) }}", "takes longer|memory"),
    "addresses": ("{{ ('http://' * 1000000)|urlize }}", "takes longer|memory"),
    "tags": ("{{ ('<' * 3000000)|striptags }}", "takes longer|memory"),
    "many parentheses": ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "recursion|nested|parenthes"),
    "many blocks": ("{% if 1 %}" * 20000 + "{% endif %}" * 20000, "recursion|nested|blocks"),
    "half a loop": ("{% for %}", "refuses|Expected|expected"),
    "unknown tag": ("{% debug %}", "unknown tag"),
    "half a surrogate pair": ("\ud800", "surrogate|UTF-8|utf-8|refuses|not text"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@contextlib.contextmanager
def limited(tokenizer: Any, template: str, seconds: float) -> Iterator[TemplateEncoder]:
    """Yield an encoder with small limits."""
    before = tokenizer.chat_template
    tokenizer.chat_template = template
    try:
        encoder = TemplateEncoder(tokenizer)
        encoder._limited._limits = seconds, BYTES
        yield encoder
    finally:
        tokenizer.chat_template = before


def result(tokenizer: Any, template: str, seconds: float = LONG) -> str:
    """Return the message of a template's refusal, or READ."""
    try:
        with limited(tokenizer, template, seconds) as encoder:
            documents = encode_at("c.jsonl:1", encoder, Conversation(chat("one", "two"), {}))
    except ValueError as error:
        return str(error)
    assert documents
    return READ


SAMPLE = (
    "class of a text", "format", "globals of lipsum", "import", "append to messages", "control characters", "power",
    "nested loops", "macro of itself", "long text", "list in a list as JSON", "half a loop",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(TEMPLATES, SAMPLE))
def test_each_template_ends_in_one_line(
    name: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(template_limits, "_GRACE", 0.5)
    head, wanted = TEMPLATES[name]
    canary = tmp_path / "canary"
    seconds = SECONDS if "takes longer" in wanted else LONG
    message = result(tokenizer, head.replace("{canary}", str(canary)) + PLAIN, seconds)
    assert re.search(wanted, message), message
    assert "\n" not in message
    assert len(message) < 400
    assert not canary.exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_plain_template_is_read(tokenizer: Any) -> None:
    assert result(tokenizer, PLAIN) == READ


@pytest.mark.full
@pytest.mark.slow
def test_a_slow_template_ends_a_run_that_skips_bad_lines(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bad lines are skipped without end; conversations that exceed a limit take its time each."""
    monkeypatch.setattr(template_limits, "_GRACE", 0.5)
    slow = "{% if messages[0].content == 'slow' %}" + LOOPS + "{% endif %}" + PLAIN
    vocabulary = type("Vocabulary", (), {"vocab_size": 999, "eod": 1})()
    chats = [chat("one", "two"), *[chat("slow", "two")] * MOST_EXCEEDED]
    with limited(tokenizer, slow, 2.0) as encoder:
        skipping = Fields(skip_bad=True)
        path = write_lines(tmp_path / "in.jsonl", chats)
        with pytest.raises(ValueError, match=r"in\.jsonl:4: .* takes longer .*, and for 2 others: change the template"):
            write_conversations(str(tmp_path / "out"), file_entries(path), (vocabulary, encoder), fields=skipping)
        path.write_text(json.dumps({"messages": chats[0]}) + "\n" + "{}\n" * 99)
        written = write_conversations(str(tmp_path / "out"), file_entries(path), (vocabulary, encoder), fields=skipping)
    assert (written.num_documents, written.num_bad) == (1, 99)
