"""Flags of the tokenizer: their settings, and equivalent training flags."""

from __future__ import annotations

import pytest

from megatron.bytescale.cli.shared.inputs import OneLineParser
from megatron.bytescale.cli.shared.tokenizer import add_tokenizer_arguments, tokenizer_settings, training_flags


def test_settings_that_were_given() -> None:
    parser = OneLineParser()
    add_tokenizer_arguments(parser)
    assert tokenizer_settings(parser.parse_args([])) == {}
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    assert tokenizer_settings(parser.parse_args(words)) == {"tokenizer_type": "NullTokenizer", "vocab_size": 9}
    flags = training_flags({"tokenizer_type": "T", "metadata_path": "a", "merge_file": "b"})
    assert flags == ["--tokenizer-type", "T", "--tokenizer-metadata", "a", "--merge-file", "b"]
    with pytest.raises(ValueError, match="vocab_size without a tokenizer: add --tokenizer-type"):
        tokenizer_settings(parser.parse_args(words[2:]))
