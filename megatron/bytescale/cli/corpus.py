"""``bytescale corpus``: write a Megatron data set from files."""

from __future__ import annotations

import argparse
import dataclasses
import json

from bytescale_ext.data.samples.sources import check_first_lines, checked_prefix, environment_entries, source_entries
from megatron.bytescale.cli.shared.inputs import size
from megatron.bytescale.cli.shared.tokenizer import add_tokenizer_arguments, tokenizer_settings, training_flags

NAME = "corpus"
HELP = "write a Megatron data set (.bin and .idx) from files, one document per file or JSONL line"
EXAMPLE = "bytescale corpus --output data/python --tokens 20000000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``bytescale corpus``."""
    parser.add_argument("--output", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx (replaced)")
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        metavar="PATH",
        help="folders, files and .jsonl files; without it the *.py files of the running Python environment",
    )
    parser.add_argument("--glob", metavar="PATTERN", help="files to take from a folder (* with --from, else *.py)")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key of the text in .jsonl (%(default)s)")
    parser.add_argument(
        "--tokens", type=size, metavar="N", help="take documents in random order up to N tokens (default: all)"
    )
    parser.add_argument("--seed", type=int, default=1234, help="seed of the random order (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Write the data set and print its figures.

    Raises:
        ValueError: a source, a line or a setting is bad.
    """
    settings = tokenizer_settings(args)
    if args.sources:
        entries = source_entries(args.sources, args.glob or "*")
    else:
        entries = environment_entries(args.glob or "*.py")
    check_first_lines(entries, args.json_key)
    checked_prefix(args.output)
    # Imported here because Megatron takes seconds to import, which --help and errors should not.
    from megatron.bytescale.core.datasets import corpus

    tokenizer = corpus.build_megatron_tokenizer(settings) if settings else None
    summary = corpus.write_corpus(
        args.output,
        entries,
        tokenizer=tokenizer,
        json_key=args.json_key,
        num_tokens=args.tokens,
        seed=args.seed,
    )
    flags = ["--data-path", args.output, *(training_flags(settings) if settings else corpus.BYTE_LEVEL_FLAGS)]
    if args.json:
        print(json.dumps({**dataclasses.asdict(summary), "training_flags": flags}, indent=2))
        return 0
    print(f"{summary.prefix}.bin, {summary.prefix}.idx ({summary.dtype})")
    print(f"documents  {summary.num_documents:,}")
    print(f"tokens     {summary.num_tokens:,}")
    if args.tokens is not None and summary.num_tokens < args.tokens:
        print(f"           fewer than --tokens {args.tokens:,}: the source has no more")
    print(
        f"length     median {summary.median_tokens:,}  p90 {summary.p90_tokens:,}  "
        f"p99 {summary.p99_tokens:,}  max {summary.max_tokens:,}"
    )
    print(f"files      {summary.num_files:,}")
    print(f"skipped    {summary.num_skipped_empty:,} empty")
    if tokenizer is not None:
        print(f"not UTF-8  {summary.num_not_utf8:,} (bad bytes replaced)")
    print(f"train with {' '.join(flags)}")
    return 0
