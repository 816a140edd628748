"""Bytes as tokens and back, in a stream."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from megatron.core.tokenizers.utils import build_tokenizer

from megatron.bytescale.cli.generate.texts import InOrder, Texts
from megatron.bytescale.core.datasets.corpus import build_megatron_tokenizer


def test_a_token_is_a_byte() -> None:
    texts = Texts(Namespace(tokenizer_type="NullTokenizer", vocab_size=257))
    assert (texts.vocab, texts.end) == (257, 256)
    assert texts.tokens("é!") == [0xC3, 0xA9, 0x21]


def test_characters_are_written_when_they_are_whole() -> None:
    texts = Texts(Namespace(tokenizer_type="NullTokenizer", vocab_size=257))
    written: list[str] = []
    take = texts.stream(written.append)
    for tokens, is_last in (([0x61, 0xC3], False), ([0xA9], False), ([0x62, 0xC3, 256], False), ([], True)):
        take(tokens, is_last)
    assert written == ["a", "é", "b", "\N{REPLACEMENT CHARACTER}"]


def test_a_small_vocabulary() -> None:
    texts = Texts(Namespace(tokenizer_type="NullTokenizer", vocab_size=61))
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
    texts = Texts(Namespace(tokenizer_type="HuggingFaceTokenizer"))
    assert (texts.vocab, texts.end) == (10_000, 9999)
    tokens = texts.tokens("aéiö")
    assert tokens == [0, 1, 2]
    written: list[str] = []
    take = texts.stream(written.append)
    for token in (*tokens, 9999):
        take([token], token == 9999)
    assert "".join(written) == "aéiö"
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in written)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("cut", range(1, 9))
def test_the_text_is_the_same_in_any_pieces(num_tokens: int, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text may end within a character; drafts give several tokens at a time."""
    made = Pairs()
    monkeypatch.setattr(build_tokenizer, "build_tokenizer", lambda args: made)
    texts = Texts(Namespace(tokenizer_type="HuggingFaceTokenizer"))
    tokens = texts.tokens("aé漢字x😀\N{REPLACEMENT CHARACTER}b")[:cut]
    written: list[str] = []
    printed = InOrder(1, texts.stream, written.append)
    for begin in range(0, len(tokens), num_tokens):
        printed.add(0, tokens[begin : begin + num_tokens], None)
        shown = "".join(written)
        assert made.detokenize(tokens).startswith(shown)
    printed.add(0, [], "")
    assert "".join(written) == made.detokenize(tokens) + "\n"


def test_code_of_a_tokenizers_folder_runs_only_if_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of the checkpoint trust the folder, whose code leaves a file."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, ran = tmp_path / "tokenizer", tmp_path / "ran"
    folder.mkdir()
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own:\n    pass\n")
    mapped = {"AutoTokenizer": ["own.Own", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": mapped}))
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", dynamic_module_utils.TIME_OUT_REMOTE_CODE)
    monkeypatch.setattr("builtins.input", lambda question: "y")
    args = Namespace(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder), trust_remote_code=True, chat_template=None,
        vocab_file=None, merge_file=None, special_tokens=None, tokenizer_hf_no_use_fast=False,
        tokenizer_hf_no_include_special_tokens=False, metadata_path=None, pad_vocab_size=False,
        sft_tokenizer_prompt_format="default",
    )  # fmt: skip
    with pytest.raises(ValueError, match="of the checkpoint runs Python code: --trust-remote-code"):
        Texts(Namespace(**{**vars(args), "tokenizer_type": "SFTTokenizer"}))
    with pytest.raises(ValueError, match="trust_remote_code"):
        build_megatron_tokenizer({**vars(args), "tokenizer_type": "SFTTokenizer"})
    with pytest.raises(ValueError, match="of the checkpoint runs Python code: --trust-remote-code"):
        Texts(args)
    assert not ran.exists()
    with pytest.raises(ValueError, match="of the checkpoint cannot be read"):
        Texts(args, trusts_code=True)
    assert ran.exists()


def test_texts_are_written_in_the_order_of_their_prompts() -> None:
    texts = Texts(Namespace(tokenizer_type="NullTokenizer", vocab_size=257))
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
