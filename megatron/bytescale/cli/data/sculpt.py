"""``bytescale data sculpt``: windows of related documents for training on long contexts (DataSculpt)."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np

from bytescale_ext.data.corpus.embed import check_embedder
from bytescale_ext.data.corpus.sculpting import SculptedCorpus, sculpt_corpus
from bytescale_ext.data.corpus.tokens import CorpusTokens, open_tokens
from bytescale_ext.data.corpus.windows_file import SUFFIX, WindowsHeader, save_windows, sha256_of
from bytescale_ext.data.samples.sources import Entry, check_first_lines, checked_prefix, file_entries
from bytescale_ext.plan.sculpt.pieces import OVERFLOWS, window_bounds
from bytescale_ext.plan.sculpt.quality import quality_of
from bytescale_ext.plan.sculpt.sculpt import SculptSettings
from megatron.bytescale.cli.shared.inputs import check_picture
from megatron.bytescale.cli.shared.options import add_json, add_option, add_plot
from megatron.bytescale.cli.shared.tokenizer import add_tokenizer_arguments, tokenizer_settings

NAME = "sculpt"
HELP = "group related documents into windows of one length, without copying the corpus"
EXAMPLE = "bytescale data sculpt --input data/python --seq-length 64K --overflow none --output data/python-64k"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale data sculpt``."""
    parser.add_argument(
        "--input",
        required=True,
        metavar="PREFIX",
        help="data set PREFIX.bin and PREFIX.idx, or a file of JSON lines, JSON or Parquet, also packed, "
        "which is first written as a data set at --output",
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
    check_options(args)
    corpus = open_tokens(data_set_of(args))
    header = WindowsHeader(args.seq_length, args.overflow, args.seed, sha256_of(corpus.prefix + ".idx"))
    sculpted = sculpt_corpus(corpus, settings, args.embedder)
    path = Path(args.output + SUFFIX)
    save_windows(path, sculpted.made.table, header)
    if args.materialise:
        materialise(corpus, sculpted, Path(args.output + ".windows"))
    if args.plot is not None:
        from bytescale_ext.draw.sculpt import draw_clusters

        draw_clusters(sculpted.pieces.vectors, sculpted.made.cluster, sculpted.pieces.length, args.plot)
    figures = report_of(corpus, sculpted, args.seq_length)
    report = {"windows": str(path), **figures, "seconds": time.perf_counter() - began}
    print(json.dumps(report, indent=2) if args.json else text_of(report, args, corpus.prefix))
    return 0


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for bad options, input or output, before any slow work."""
    check_embedder(args.embedder)
    check_picture("--plot", args.plot)
    settings = tokenizer_settings(args)
    if settings and not is_text(args.input):
        raise ValueError(f"--tokenizer-type is for files of text: --input {args.input} holds tokens already")
    if is_text(args.input):
        check_first_lines(documents_of(args), args.json_key)
    else:
        open_tokens(args.input)
    checked_prefix(args.output, "--output")


def is_text(source: str) -> bool:
    """Return whether the input is a file of documents, not the prefix of a data set."""
    return source.endswith(".jsonl") or (Path(source).is_file() and not Path(source + ".idx").exists())


def documents_of(args: argparse.Namespace) -> list[Entry]:
    """Return the documents of a file. Raises ValueError if it cannot be read, or is one text."""
    entries = file_entries(Path(args.input), args.json_key)
    if any(entry.line is None for entry in entries):
        raise ValueError(
            f"--input {args.input}: neither a data set nor a file of JSON or Parquet with documents under the key "
            f"{args.json_key!r}"
        )
    return entries


def data_set_of(args: argparse.Namespace) -> str:
    """Return the prefix of the data set, after writing it if the input is text."""
    if not is_text(args.input):
        return str(args.input)
    # Megatron takes seconds to import, so --help and errors come first.
    from megatron.bytescale.core.datasets import corpus

    settings = tokenizer_settings(args)
    corpus.write_corpus(
        args.output,
        documents_of(args),
        tokenizer=corpus.build_megatron_tokenizer(settings) if settings else None,
        keys=corpus.Keys(args.json_key),
    )
    return str(args.output)


def materialise(corpus: CorpusTokens, sculpted: SculptedCorpus, prefix: Path) -> None:
    """Write a data set whose documents are the windows."""
    from megatron.bytescale.core.datasets.corpus import write_tokens

    table = sculpted.made.table
    bounds = window_bounds(table).tolist()
    windows = (
        np.concatenate([corpus.read(*row) for row in table[["document", "start", "length"]][first:end].tolist()])
        for first, end in pairwise(bounds)
    )
    write_tokens(prefix, windows, corpus.tokens.dtype.type)


def report_of(corpus: CorpusTokens, sculpted: SculptedCorpus, seq_length: int) -> dict[str, object]:
    """Return the figures of the windows."""
    clusters = sculpted.cluster_tokens
    return {
        "documents": len(corpus.lengths),
        "tokens": int(corpus.lengths.sum()),
        **asdict(quality_of(sculpted.made.table, sculpted.pieces, seq_length)),
        "documents_longer_than_context": sculpted.num_long,
        "clusters": len(clusters),
        "largest_cluster_tokens": int(clusters[0]),
        "median_cluster_tokens": int(np.median(clusters)),
    }


def text_of(report: dict[str, object], args: argparse.Namespace, prefix: str) -> str:
    """Return the report as text."""
    long = report["documents_longer_than_context"]
    lines = [
        f"{report['windows']}",
        f"documents   {report['documents']:,} of {report['tokens']:,} tokens; {long:,} are longer than a window",
        f"windows     {report['num_windows']:,} of {args.seq_length:,} tokens, filled to {report['fill']:.3f}",
        f"inside      {report['documents_per_window']:.1f} documents a window, relevance {report['relevance']:.3f} "
        f"(of random ones {report['random_relevance']:.3f})",
        f"cut         {report['cut']:.1%} of the documents that fit, tokens kept {report['tokens_kept']:.1%}",
        f"clusters    {report['clusters']:,}, tokens median {report['median_cluster_tokens']:,}, "
        f"largest {report['largest_cluster_tokens']:,}",
        f"seconds     {report['seconds']:.1f}",
        f"train with --data-path {prefix} --sculpt-windows {report['windows']} --seq-length {args.seq_length}",
    ]
    return "\n".join(lines)
