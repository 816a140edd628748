"""Bytes as tokens and back, in a stream."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from megatron.core.tokenizers.utils import build_tokenizer

from megatron.bytescale.cli.generate.texts import InOrder, Texts


def test_a_token_is_a_byte() -> None:
    texts = Texts(SimpleNamespace(tokenizer_type="NullTokenizer", vocab_size=257))
    assert (texts.vocab, texts.end) == (257, 256)
    assert texts.tokens("é!") == [0xC3, 0xA9, 0x21]


def test_characters_are_written_when_they_are_whole() -> None:
    texts = Texts(SimpleNamespace(tokenizer_type="NullTokenizer", vocab_size=257))
    written: list[str] = []
    take = texts.stream(written.append)
    for tokens in ([0x61, 0xC3], [0xA9], [0x62, 256]):
        take(tokens)
    assert written == ["a", "é", "b"]


def test_a_small_vocabulary() -> None:
    texts = Texts(SimpleNamespace(tokenizer_type="NullTokenizer", vocab_size=61))
    assert texts.end is None
    assert texts.tokens("12") == [49, 50]
    with pytest.raises(ValueError, match="the prompt has the byte 97, and the vocabulary has 61 tokens"):
        texts.tokens("1a")


class Pairs:
    """Tokenizer with two bytes per token, so that a token may end within a character; 9999 ends a text."""

    vocab_size, eod = 10_000, 9999

    def __init__(self) -> None:
        self.pairs: list[bytes] = []

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        first = len(self.pairs)
        self.pairs += [data[place : place + 2] for place in range(0, len(data), 2)]
        return list(range(first, len(self.pairs)))

    def detokenize(self, tokens: list[int]) -> str:
        return b"".join(self.pairs[token] for token in tokens).decode("utf-8", "replace")


def test_a_tokenizer_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Pairs()
    monkeypatch.setattr(build_tokenizer, "build_tokenizer", lambda args: made)
    texts = Texts(SimpleNamespace(tokenizer_type="HuggingFaceTokenizer"))
    assert (texts.vocab, texts.end) == (10_000, 9999)
    tokens = texts.tokens("aéiö")
    assert tokens == [0, 1, 2]
    written: list[str] = []
    take = texts.stream(written.append)
    for token in (*tokens, 9999):
        take([token])
    assert "".join(written) == "aéiö"
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in written)


def test_texts_are_written_in_the_order_of_their_prompts() -> None:
    texts = Texts(SimpleNamespace(tokenizer_type="NullTokenizer", vocab_size=257))
    written: list[str] = []
    printed = InOrder(3, texts.stream, written.append)
    steps: list[tuple[int, str, str | None]] = [
        (0, "a", None), (1, "x", None), (0, "b", None), (2, "1", ""), (1, "y", ""), (0, "", None), (0, "c", "end"),
    ]  # fmt: skip
    shown = []
    for index, text, last in steps:
        printed.add(index, list(text.encode()), last)
        shown.append("".join(written))
    assert shown == ["a", "a", "ab", "ab", "ab", "ab", "abcend\nxy\n1\n"]
