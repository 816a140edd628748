"""``bytescale corpus``: write a Megatron data set from files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.data.samples.records import MOST_BYTES
from bytescale_ext.data.samples.rollouts import RolloutKeys
from bytescale_ext.data.samples.sources import (
    Entry,
    check_first_lines,
    checked_prefix,
    environment_entries,
    source_entries,
    unread_json,
)
from bytescale_ext.errors import one_line
from bytescale_ext.json_input import printable
from megatron.bytescale.cli.shared.inputs import DATA_SET, check_apart, size
from megatron.bytescale.cli.shared.options import add_json, add_option
from megatron.bytescale.cli.shared.tokenizer import add_tokenizer_arguments, tokenizer_settings, training_flags

if TYPE_CHECKING:
    from megatron.bytescale.core.datasets.corpus import CorpusSummary

NAME = "corpus"
HELP = "write a Megatron data set (.bin and .idx) from files, one document per file or JSONL line"
EXAMPLE = "bytescale corpus --output data/python --tokens 20000000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale corpus``."""
    parser.add_argument("--output", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx (replaced)")
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        metavar="PATH",
        help="folders and files, also of JSON and Parquet, also packed (default: the *.py files of the running Python)",
    )
    parser.add_argument("--glob", metavar="PATTERN", help="files to take from a folder (* with --from, else *.py)")
    add_option(parser, "--json-key")
    parser.add_argument(
        "--weights",
        metavar="KEY",
        help="also write the weight of each token's loss: a number under KEY, or a list with a number for each token; "
        "with --sft a number for the answers of the line. Train with --sft",
    )
    parser.add_argument(
        "--tokens", type=size, metavar="N", help="take documents in random order up to N tokens (default: all)"
    )
    add_option(parser, "--seed", note="for the random order")
    add_json(parser)
    add_conversation_arguments(parser.add_argument_group("conversations"))
    add_tokenizer_arguments(parser)


def add_conversation_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options of conversations."""
    group.add_argument(
        "--sft",
        action="store_true",
        help="lines of .jsonl files hold chats under the key 'messages'; also write weights, 1 for tokens of answers",
    )
    group.add_argument(
        "--pairs",
        action="store_true",
        help="lines hold two chats, 'chosen' and 'rejected', with one prompt; train with --sft --loss dpo",
    )
    group.add_argument(
        "--groups",
        metavar="KEY",
        help="neighbouring lines with one value under KEY are a group, such as the answers to one prompt, and share "
        "each step; train with --sft --loss grpo, or with --sft --loss-normalization groups",
    )
    group.add_argument(
        "--rewards",
        metavar="KEY",
        help="also write advantages: the number under KEY less the mean of its group, divided by the group's standard "
        "deviation",
    )
    group.add_argument(
        "--advantages",
        metavar="KEY",
        help="also write advantages: a number under KEY, or a list with a number for each token of the answer",
    )
    group.add_argument(
        "--logprobs",
        metavar="KEY",
        help="also write the log-probabilities of the policy that gave the answer: a list under KEY, with a number for "
        "each token of the answer",
    )
    group.add_argument(
        "--on-bad", choices=("stop", "skip"), help="end at a bad line (default), or leave bad lines out and count them"
    )
    group.add_argument(
        "--sft-tokenizer-prompt-format",
        choices=("nemotron-h-aligned", "nemotron-nano-v2", "identity", "default"),
        help="format of an SFTTokenizer, as in training (nemotron-h-aligned)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the data set and print its figures.

    Raises:
        ValueError: a source, a line or a setting is bad.
    """
    check_conversation_options(args)
    settings = tokenizer_settings(args)
    entries = read_sources(args)
    checked_prefix(args.output)
    check_apart_from(args, entries)
    if args.sft:
        return write_chats(args, entries, settings)
    # Megatron takes seconds to import, so --help and errors come first.
    from megatron.bytescale.core.datasets import corpus

    tokenizer = corpus.build_megatron_tokenizer(settings) if settings else None
    summary = corpus.write_corpus(
        args.output,
        entries,
        tokenizer=tokenizer,
        keys=corpus.Keys(args.json_key, args.weights),
        num_tokens=args.tokens,
        seed=args.seed,
    )
    sft = ["--sft"] if args.weights else []
    flags = [*sft, "--data-path", args.output, *(training_flags(settings) if settings else corpus.BYTE_LEVEL_FLAGS)]
    if args.json:
        return print_json(summary, flags)
    prefix = one_line(summary.prefix)
    print(f"{prefix}.bin, {prefix}.idx ({summary.dtype})")
    print(f"documents  {summary.num_documents:,}")
    print_sizes(args, summary)
    print(f"skipped    {summary.num_skipped_empty:,} empty{too_long(summary)}")
    print(f"not UTF-8  {summary.num_not_utf8:,} ({'bad bytes replaced' if tokenizer else 'each byte is a token'})")
    print(f"train with {shlex.join(flags)}")
    return 0


def check_apart_from(args: argparse.Namespace, entries: Sequence[Entry]) -> None:
    """Raise ValueError if the data set would be among the documents, in this call or in the next."""
    for name in (f"{args.output}{ending}" for ending in DATA_SET):
        files = [entry.path for entry in entries if entry.path.name == Path(name).name]
        is_read = Path(name).match(args.glob or "*") and (args.glob is not None or not args.sft)
        check_apart(name, files, args.sources or [] if is_read else [])


def check_conversation_options(args: argparse.Namespace) -> None:
    """Raise ValueError for options of conversations that lack another, or do not go together."""
    of_rollouts = {"--rewards": args.rewards, "--advantages": args.advantages, "--logprobs": args.logprobs}
    if not args.sft and (args.on_bad or args.pairs or args.groups or args.sft_tokenizer_prompt_format):
        raise ValueError("--on-bad, --pairs, --groups and --sft-tokenizer-prompt-format need --sft")
    if args.pairs and args.weights:
        raise ValueError("--pairs with --weights: the loss of pairs weighs their tokens")
    if not args.groups:
        for option, key in of_rollouts.items():
            if key:
                raise ValueError(f"{option} needs --groups KEY, the name of each line's group")
        return
    refused = {"--pairs": args.pairs, "--tokens": args.tokens, "--on-bad skip": args.on_bad == "skip"}
    for option, is_given in refused.items():
        if is_given:
            raise ValueError(f"--groups with {option}: groups are written whole, in the order of their lines")
    if args.rewards and args.advantages:
        raise ValueError("--rewards with --advantages: advantages are given, or made of rewards; remove one of them")


def read_sources(args: argparse.Namespace) -> list[Entry]:
    """Return the documents or conversations of the sources. Raises ValueError for bad sources."""
    if args.sft:
        if not args.sources:
            raise ValueError("--sft needs --from FILE.jsonl, whose lines hold conversations")
        entries = source_entries(args.sources, args.glob or "*", "chosen" if args.pairs else "messages")
        if args.glob is None:  # other files of a folder
            entries = [entry for entry in entries if entry.line is not None or str(entry.path) in args.sources]
        if path := next((entry.path for entry in entries if entry.line is None), None):
            raise ValueError(f"{path}: conversations are records with the key 'messages' of a JSON file: change --from")
        return entries
    if not args.sources:
        return environment_entries(args.glob or "*.py")
    entries = source_entries(args.sources, args.glob or "*", args.json_key)
    if as_text := unread_json(entries):
        print(
            printable(
                f"note: {as_text[0]} begins like JSON and is taken as one text, because of its name, or because its "
                f"first value is no object with the key {args.json_key!r} ({len(as_text):,} such files)"
            ),
            file=sys.stderr,
        )
    check_first_lines(entries, args.json_key)
    return entries


def write_chats(args: argparse.Namespace, entries: list[Entry], settings: dict[str, object]) -> int:
    """Write conversations with weights, and print figures. Raises ValueError for a bad conversation."""
    from megatron.bytescale.core.datasets import conversations

    tokenizer = conversations.chat_tokenizer(settings)
    rollouts = RolloutKeys(args.groups, args.rewards, args.advantages, args.logprobs) if args.groups else None
    options = {"num_tokens": args.tokens, "seed": args.seed,
               "fields": conversations.Fields(args.weights, args.pairs, args.on_bad == "skip", rollouts)}  # fmt: skip
    summary = conversations.write_conversations(args.output, entries, tokenizer, **options)
    flags = ["--sft", "--data-path", args.output, *training_flags(settings)]
    if args.json:
        return print_json(summary, flags)
    print(f"{one_line(summary.prefix)}.bin, .idx ({summary.dtype}), {', '.join(summary.sidecars)}")
    print(f"chats      {summary.num_documents:,}{f' in {summary.num_groups:,} groups' if summary.num_groups else ''}")
    print_sizes(args, summary)
    print(f"answers    {summary.num_answer_tokens:,} tokens ({summary.num_answer_tokens / summary.num_tokens:.1%})")
    without = f"{summary.num_without_answer:,} without an answer"
    print(f"skipped    {summary.num_skipped_empty:,} empty, {without}{too_long(summary)}")
    for note in summary.notes:
        print(printable(note))
    if summary.num_bad:
        print(printable(f"bad lines  {summary.num_bad:,}; the first: {summary.first_bad}"))
    print(f"train with {shlex.join(flags)}")
    return 0


def too_long(summary: CorpusSummary) -> str:
    """Return the count of records that are left out because of their size, "" without any."""
    return f", {summary.num_too_long:,} of more than {MOST_BYTES >> 20} MiB" if summary.num_too_long else ""


def print_json(summary: CorpusSummary, flags: list[str]) -> int:
    """Print a summary as JSON."""
    print(json.dumps({**dataclasses.asdict(summary), "training_flags": flags}, indent=2))
    return 0


def print_sizes(args: argparse.Namespace, summary: CorpusSummary) -> None:
    """Print the numbers of tokens and files, and the lengths of documents."""
    print(f"tokens     {summary.num_tokens:,}")
    if args.tokens is not None and summary.num_tokens < args.tokens:
        print(f"           fewer than --tokens {args.tokens:,}: the source has no more")
    print(
        f"length     median {summary.median_tokens:,}  p90 {summary.p90_tokens:,}  "
        f"p99 {summary.p99_tokens:,}  max {summary.max_tokens:,}"
    )
    print(f"files      {summary.num_files:,}")
