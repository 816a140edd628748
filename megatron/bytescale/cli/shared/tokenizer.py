"""Megatron's tokenizer flags, for subcommands that turn text into tokens."""

from __future__ import annotations

import argparse

from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.arguments.values import TokenizerChoice, check_tokenizer
from megatron.bytescale.cli.shared.inputs import size

_SETTINGS = (
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "vocab_size",
    "tiktoken_pattern",
    "metadata_path",
    "sft_tokenizer_prompt_format",
)


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("tokenizer (Megatron's flags; without --tokenizer-type a token is a byte)")
    group.add_argument("--tokenizer-type", help="as in training, for example HuggingFaceTokenizer")
    group.add_argument("--tokenizer-model", metavar="PATH")
    group.add_argument("--vocab-file", metavar="PATH")
    group.add_argument("--merge-file", metavar="PATH")
    group.add_argument("--vocab-size", type=size, metavar="N")
    group.add_argument("--tiktoken-pattern", choices=("v1", "v2"))
    group.add_argument("--tokenizer-metadata", dest="metadata_path", metavar="PATH")


def tokenizer_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the given settings by name; without any, a token is a byte. Raises ValueError for bad settings."""
    settings = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name, None) is not None}
    if settings and args.tokenizer_type is None:
        raise ValueError(f"{', '.join(sorted(settings))} without a tokenizer: add --tokenizer-type")
    if settings:
        check_tokenizer(options_of(args, TokenizerChoice))
    return settings


def training_flags(settings: dict[str, object]) -> list[str]:
    """Return the training flags of the same tokenizer."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = "--tokenizer-metadata" if name == "metadata_path" else "--" + name.replace("_", "-")
        flags += [flag, str(value)]
    return flags
