"""Flags of the tokenizer: which settings they give, and the training flags that say the same."""

from __future__ import annotations

import pytest

from megatron.bytescale.cli.shared.inputs import OneLineParser
from megatron.bytescale.cli.shared.tokenizer import add_tokenizer_arguments, tokenizer_settings, training_flags


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ("metadata_path", "--tokenizer-metadata"),
        ("tokenizer_model", "--tokenizer-model"),
        ("merge_file", "--merge-file"),
    ],
)
def test_each_setting_has_its_training_flag(setting: str, flag: str) -> None:
    assert training_flags({"tokenizer_type": "T", setting: "a"}) == ["--tokenizer-type", "T", flag, "a"]


def test_settings_that_were_given() -> None:
    parser = OneLineParser()
    add_tokenizer_arguments(parser)
    assert tokenizer_settings(parser.parse_args([])) == {}
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    assert tokenizer_settings(parser.parse_args(words)) == {"tokenizer_type": "NullTokenizer", "vocab_size": 9}
    with pytest.raises(ValueError, match="vocab_size without a tokenizer: add --tokenizer-type"):
        tokenizer_settings(parser.parse_args(words[2:]))
