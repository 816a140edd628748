"""``bytescale data mix``: write the weights of sources in a file that Megatron reads, and print their reasons."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.data.clean.tally import write_whole
from bytescale_ext.data.mix.weights import (
    MixturePart,
    ShareFactors,
    SourceQuality,
    SourceShare,
    blend,
    epochs,
    reweigh,
    weigh,
)
from bytescale_ext.data.samples.lengths import check_indexed_dataset, read_idx_lengths, sample_table
from bytescale_ext.errors import one_line
from megatron.bytescale.cli.data.executors import add_executor, executor_settings
from megatron.bytescale.cli.shared.inputs import DATA_SET, check_apart, count, size
from megatron.bytescale.cli.shared.options import add_json, add_option
from megatron.bytescale.cli.shared.tables import aligned

if TYPE_CHECKING:
    from bytescale_ext.data.mix.curves import Proposal

NAME = "mix"
HELP = "weigh the sources of a corpus by size, duplication, quality, and small training runs"
EXAMPLE = "bytescale data mix --report data/cleaned/report.json --seq-length 64K --output data/mixture"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale data mix``."""
    parser.add_argument("--report", type=Path, metavar="report.json", help="report of bytescale data clean --tokenize")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="NAME=PREFIX", help="data sets in addition to the report's"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="write weights for --data-args-path")
    add_option(parser, "--seq-length", required=True, note="as in training")
    parser.add_argument(
        "--samples",
        choices=("documents", "windows"),
        default="documents",
        help="samples of the training, which Megatron's weights count: documents, with --hybrid-data-parallel "
        "(default); windows of one length, with --sculpt-windows or without both flags",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="a higher value evens out the shares (1)"
    )
    parser.add_argument(
        "--duplication-power", type=float, default=1.0, metavar="A", help="weight of duplication; 0 ignores it (1)"
    )
    parser.add_argument(
        "--quality-power", type=float, default=1.0, metavar="B", help="weight of quality; 0 ignores it (1)"
    )
    parser.add_argument(
        "--simulate", type=size, metavar="TOKENS", help="print the epochs of each data set in a training of TOKENS"
    )
    parser.add_argument("--proxy-steps", type=count, metavar="N", help="train a small model for N steps on each source")
    parser.add_argument("--proxy-seeds", type=count, default=3, metavar="K", help="small runs of each source (3)")
    add_executor(parser, "tasks of the small runs; they do not change the weights (one for each run)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Weigh the sources, write the file, and print the weights with their reasons.

    Raises:
        ValueError: an option, the report or a data set is bad, or a small run has failed.
    """
    factors = _factors(args)
    settings = executor_settings(args) if args.proxy_steps is not None else None
    check_apart(args.output, [args.report] if args.report is not None else [])
    parts, known = _parts(args)
    check_apart(args.output, [f"{part.prefix}{ending}" for part in parts for ending in DATA_SET])
    if args.output.is_dir():
        raise ValueError(f"--output {args.output} is a folder: give a file name")
    weighed = weigh(parts, known, factors)
    proposals: dict[str, Proposal] = {}
    if args.proxy_steps is not None:
        from megatron.bytescale.cli.data import proxy

        runs = proxy.ProxyRuns(tuple(parts), args.proxy_steps, args.proxy_seeds, Path(f"{args.output}.proxy"))
        found = proxy.proposals_of(runs, settings, args.tasks)
        if found is None:
            print(f"submitted; give the same command again after these jobs, and it writes {one_line(args.output)}")
            return 0
        proposals = found
        weighed = reweigh(weighed, {name: proposal.factor for name, proposal in proposals.items() if proposal.is_clear})
    blended = blend(parts, weighed)
    write_whole(args.output, "".join(f"{weight:.6g} {prefix}\n" for weight, prefix in blended))
    repetitions = epochs(parts, weighed, args.simulate) if args.simulate is not None else {}
    if args.json:
        values = {
            "sources": [dataclasses.asdict(source) for source in weighed],
            "blend": [{"weight": weight, "prefix": prefix} for weight, prefix in blended],
            "epochs": repetitions,
            "proxies": {
                name: {**dataclasses.asdict(proposal), "is_clear": proposal.is_clear}
                for name, proposal in proposals.items()
            },
        }
        print(json.dumps(values, indent=2))
        return 0
    print("\n".join(_text(weighed, proposals, parts, repetitions)))
    print(f"train with --data-args-path {shlex.quote(str(args.output))} --seq-length {args.seq_length}")
    return 0


def _factors(args: argparse.Namespace) -> ShareFactors:
    if not (math.isfinite(args.temperature) and args.temperature > 0):
        raise ValueError(f"--temperature {args.temperature:g}: give a number above 0")
    for flag in ("duplication_power", "quality_power"):
        if not 0 <= getattr(args, flag) < math.inf:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag):g}: give a number of 0 or more")
    return ShareFactors(args.temperature, args.duplication_power, args.quality_power)


def _parts(args: argparse.Namespace) -> tuple[list[MixturePart], dict[str, SourceQuality]]:
    """Return the data sets, and the report's figures of their sources."""
    data_sets: list[tuple[str, str, float]] = []
    known: dict[str, SourceQuality] = {}
    if args.report is not None:
        from bytescale_ext.data.clean.report import load_report

        report = load_report(args.report)
        for data_set in report.data_sets:
            if data_set["prefix"] is None:
                raise ValueError(f"{args.report}: {data_set['name']} has text and no tokens: clean with --tokenize")
            data_sets.append((str(data_set["prefix"]), str(data_set["source"]), float(str(data_set["weight"]))))
        # With weights by copies, duplicates already count for a source, so duplication does not lower its share.
        is_weighed = report.recipe["policy"] == "weight"
        for name, about in report.sources.items():
            known[name] = SourceQuality(0.0 if is_weighed else about.duplication, about.quality)
    for words in args.data:
        name, _, prefix = words.partition("=")
        if not name or not prefix:
            raise ValueError(f"--data {words}: give NAME=PREFIX")
        data_sets.append((prefix, name, 1.0))
    if not data_sets:
        raise ValueError("no data sets: give --report or --data")
    return [_part(*data_set, args) for data_set in data_sets], known


def _part(prefix: str, source: str, weight: float, args: argparse.Namespace) -> MixturePart:
    check_indexed_dataset(prefix)
    lengths = read_idx_lengths(prefix)
    tokens = int(lengths.sum())
    documents = len(sample_table(lengths, args.seq_length))
    return MixturePart(
        prefix, source, tokens, documents if args.samples == "documents" else -(-tokens // args.seq_length), weight
    )


def _text(
    weighed: Sequence[SourceShare],
    proposals: dict[str, Proposal],
    parts: Sequence[MixturePart],
    repetitions: dict[str, float],
) -> list[str]:
    rows = [["source", "tokens", "share by size", "no duplicates", "quality", "small runs", "share"]]
    for source in weighed:
        proposal = proposals.get(source.source)
        verdict = "-"
        if proposal is not None:
            verdict = f"x {proposal.factor:.2f} ({proposal.low:.2f} to {proposal.high:.2f})"
            verdict += "" if proposal.is_clear else ", left out"
        values = (
            f"{source.size:.1%}",
            f"x {source.duplication:.2f}",
            f"x {source.quality:.2f}",
            verdict,
            f"{source.share:.1%}",
        )
        rows.append([source.source, f"{source.tokens:,.0f}", *values])
    lines = aligned(rows, {0})
    if repetitions:
        of_prefix = {part.prefix: part for part in parts}
        table = [["data set", "tokens", "epochs"]]
        table += [[prefix, f"{of_prefix[prefix].tokens:,}", f"{often:.2f}"] for prefix, often in repetitions.items()]
        lines += ["", *aligned(table, {0})]
    return lines
