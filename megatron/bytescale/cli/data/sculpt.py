"""``bytescale data sculpt``: windows of related documents for training on long contexts (DataSculpt)."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from bytescale_ext.data.corpus.blending import Blend, blend_of, read_mixture
from bytescale_ext.data.corpus.embed import check_embedder
from bytescale_ext.data.corpus.tokens import open_tokens
from bytescale_ext.data.corpus.windows_file import ORDERS, SUFFIX, load_windows
from bytescale_ext.data.samples.sources import Entry, check_first_lines, checked_prefix, file_entries
from bytescale_ext.errors import one_line
from bytescale_ext.json_input import json_settings, stored_text
from bytescale_ext.new_file import make_own_folder, write_text
from bytescale_ext.plan.sculpt.pieces import OVERFLOWS, window_bounds
from bytescale_ext.plan.sculpt.sculpt import SculptSettings
from megatron.bytescale.cli.data.executors import add_executor, executor_settings
from megatron.bytescale.cli.shared.inputs import check_apart, check_picture
from megatron.bytescale.cli.shared.options import add_json, add_option, add_plot
from megatron.bytescale.cli.shared.tokenizer import add_tokenizer_arguments, tokenizer_settings

NAME = "sculpt"
HELP = "group related documents into windows of one length, without copying the corpus"
EXAMPLE = "bytescale data sculpt --input data/python --seq-length 64K --overflow none --output data/python-64k"

_WORK: Final = ".windows.work"
WINDOWS: Final = ".windows"  # ends the prefix of the data set whose documents are windows
_DEFAULT_TASKS: Final = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale data sculpt``."""
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument(
        "--input",
        nargs="+",
        metavar="PREFIX",
        help="data set PREFIX.bin and PREFIX.idx, or a file of JSON lines, JSON or Parquet, also packed, "
        "which is first written as a data set at --output. "
        "The documents of several data sets are written as one data set at --output",
    )
    sources.add_argument(
        "--mixture",
        type=Path,
        metavar="FILE",
        help="weights of bytescale data mix --samples windows: write one data set with these shares of the tokens, by "
        "leaving out and repeating documents, and make windows over all of them",
    )
    add_option(parser, "--seq-length", required=True, note="each window fills one sequence")
    parser.add_argument(
        "--overflow",
        choices=OVERFLOWS,
        default=OVERFLOWS[0],
        help="documents that do not fit in the rest of a window: none, another window gets the document (default); "
        "truncate, their end is dropped; split, another window gets their end. Documents longer than a window are "
        "always cut",
    )
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help=f"write PREFIX{SUFFIX} and a description of its inputs"
    )
    add_option(parser, "--seed")
    parser.add_argument(
        "--embedder",
        metavar="hf:PATH",
        help="folder of a sentence-transformers model; default: words weighed by rarity (TF-IDF), without a model",
    )
    parser.add_argument(
        "--materialise",
        action="store_true",
        help="also write the windows as the documents of a data set, PREFIX.windows.bin and PREFIX.windows.idx",
    )
    parser.add_argument(
        "--order",
        choices=ORDERS,
        default=ORDERS[0],
        help="documents in a window: in the order of the data set (default); next to similar documents; or in an "
        "order that depends on the seed of the training and the epoch",
    )
    add_executor(parser, "tasks of the work; they do not change the windows (one for each 65,536 documents, up to 32)")
    add_json(parser)
    add_plot(parser, "a map of the clusters and their sizes")
    add_option(parser, "--json-key")
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Make the windows, write them, and print the report.

    Raises:
        ValueError: an option, a file or the data set is bad, or no window can be made.
    """
    began = time.perf_counter()
    settings = SculptSettings(args.seq_length, args.overflow, args.seed)
    executor = executor_settings(args)
    prefix, passes = data_set_of(args, checked_documents(args))
    from bytescale_ext.data.corpus.sculpting import REPORT, SculptJob, clustered_pieces, sculpt_stages
    from bytescale_ext.data.tasks.stages import run_stages

    path, work = Path(args.output + SUFFIX), Path(args.output + _WORK)
    job = SculptJob(prefix, settings, args.embedder, work, path, passes, args.order)
    tasks = args.tasks or min(job.num_shards, _DEFAULT_TASKS)
    begin(work, f"{job.key()} {tasks} tasks")
    last = Materialise(prefix, path, Path(args.output + WINDOWS)) if args.materialise else None
    if not (work / REPORT).exists():
        run_stages(sculpt_stages(job, tasks, last), work, executor)
    if not (work / REPORT).exists():
        print(f"submitted; the last job writes {one_line(path)}, and the same command then prints the report")
        return 0
    if args.plot is not None:
        from bytescale_ext.draw.sculpt import draw_clusters

        draw_clusters(*clustered_pieces(job), args.plot)
    figures = json_settings((work / REPORT).read_text())
    report = {"windows": str(path), **figures, "seconds": time.perf_counter() - began}
    shutil.rmtree(work)
    print(json.dumps(report, indent=2) if args.json else text_of(report, args, prefix))
    return 0


def begin(work: Path, key: str) -> None:
    """Make the work folder, or keep the folder of an unfinished run.

    Raises ValueError for work on other windows, and OSError as ``make_own_folder``.
    """
    noted = work / "settings"
    make_own_folder(work)
    if noted.exists() and stored_text(noted) != key:
        raise ValueError(f"{work}: unfinished work with other options, or on other files: remove the folder")
    write_text(noted, key)


def checked_documents(args: argparse.Namespace) -> list[Entry]:
    """Return the documents of a file of texts; none if the input has tokens.

    Raises ValueError for bad options, input or output, before any slow work.
    """
    check_embedder(args.embedder)
    check_picture("--plot", args.plot)
    settings, inputs = tokenizer_settings(args), args.input or []
    given = f"--mixture {args.mixture}" if args.mixture is not None else f"--input {' '.join(inputs)}"
    if settings and not is_text(inputs):
        raise ValueError(f"--tokenizer-type is for a file of texts: {given} holds tokens already")
    documents = documents_of(args) if is_text(inputs) else []
    check_first_lines(documents, args.json_key)
    for prefix in [] if is_text(inputs) else inputs:
        open_tokens(prefix)
    checked_prefix(args.output, "--output")
    read = [prefix for _, prefix in weighted(args)]
    if args.mixture or len(inputs) > 1:
        check_apart(args.output, read)
    if args.materialise:
        check_apart(args.output + WINDOWS, read)
    return documents


def is_text(inputs: Sequence[str]) -> bool:
    """Return whether the input is one file of documents, not prefixes of data sets."""
    if len(inputs) != 1:
        return False
    return inputs[0].endswith(".jsonl") or (Path(inputs[0]).is_file() and not Path(inputs[0] + ".idx").exists())


def documents_of(args: argparse.Namespace) -> list[Entry]:
    """Return the documents of a file. Raises ValueError if it cannot be read, or is one text."""
    (source,) = args.input
    entries = file_entries(Path(source), args.json_key)
    if any(entry.line is None for entry in entries):
        raise ValueError(
            f"--input {source}: neither a data set nor a file of JSON or Parquet with documents under the key "
            f"{args.json_key!r}"
        )
    return entries


def weighted(args: argparse.Namespace) -> list[tuple[float | None, str]]:
    """Return (share of the tokens, or None, and prefix) of each data set. Raises ValueError for a bad mixture."""
    return [(None, prefix) for prefix in args.input] if args.mixture is None else read_mixture(args.mixture)


def data_set_of(args: argparse.Namespace, documents: list[Entry]) -> tuple[str, tuple[int, ...]]:
    """Return the prefix of the data set, after writing it if there are texts or several data sets, and its passes.

    ``documents``: documents of a file of texts.
    """
    inputs = args.input or []
    if len(inputs) == 1 and not is_text(inputs):
        return str(inputs[0]), (0,)
    # Megatron takes seconds to import, so --help and errors come first.
    from megatron.bytescale.core.datasets import corpus

    if len(inputs) != 1:
        return str(args.output), write_blend(args.output, blend_of(weighted(args), args.seed))
    settings = tokenizer_settings(args)
    corpus.write_corpus(
        args.output,
        documents,
        tokenizer=corpus.build_megatron_tokenizer(settings) if settings else None,
        keys=corpus.Keys(args.json_key),
    )
    return str(args.output), (0,)


def write_blend(prefix: str, blend: Blend) -> tuple[int, ...]:
    """Write the documents of a blend as a data set, and return the first document of each pass."""
    from megatron.bytescale.core.datasets.corpus import write_tokens

    passes: list[int] = []

    def documents() -> Iterator[np.ndarray]:
        count = 0
        for number in range(blend.num_passes):
            passes.append(count)
            for tokens in blend.documents(number):
                count += 1
                yield tokens

    write_tokens(Path(prefix), documents(), blend.dtype.type)
    return tuple(passes)


@dataclass(frozen=True)
class Materialise:
    """Step that writes a data set whose documents are the windows.

    Attributes:
        prefix: data set of the documents.
        windows: file of the windows.
        output: prefix of the data set to write.
    """

    prefix: str
    windows: Path
    output: Path

    def __call__(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the data set."""
        from megatron.bytescale.core.datasets.corpus import write_tokens

        corpus, (table, _) = open_tokens(self.prefix), load_windows(self.windows)
        windows = (
            np.concatenate([corpus.read(*row) for row in table[["document", "start", "length"]][first:end].tolist()])
            for first, end in pairwise(window_bounds(table).tolist())
        )
        write_tokens(self.output, windows, corpus.tokens.dtype.type)


def text_of(report: dict[str, object], args: argparse.Namespace, prefix: str) -> str:
    """Return the report as text."""
    long = report["documents_longer_than_context"]
    windows = str(report["windows"])
    flags = ["--data-path", prefix, "--sculpt-windows", windows, "--seq-length", str(args.seq_length)]
    lines = [
        one_line(windows),
        f"documents   {report['documents']:,} of {report['tokens']:,} tokens; {long:,} are longer than a window",
        f"windows     {report['num_windows']:,} of {args.seq_length:,} tokens, filled to {report['fill']:.3f}",
        f"inside      {report['documents_per_window']:.1f} documents a window, relevance {report['relevance']:.3f} "
        f"(of random ones {report['random_relevance']:.3f})",
        f"cut         {report['cut']:.1%} of the documents that fit, tokens kept {report['tokens_kept']:.1%}",
        f"clusters    {report['clusters']:,}, tokens median {report['median_cluster_tokens']:,}, "
        f"largest {report['largest_cluster_tokens']:,}",
        f"seconds     {report['seconds']:.1f}",
        f"train with {shlex.join(flags)}",
    ]
    return "\n".join(lines)
