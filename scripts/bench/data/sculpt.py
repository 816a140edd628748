"""Compare windows of related documents with three other ways to make windows, on real text of this machine, on CPU.

    .venv/bin/python scripts/bench/data/sculpt.py [--corpora python debian] [--json] [--plot F.png]

A document is a file, and a token is a byte. The corpora are:

- python: the *.py files of the running environment, in random order up to ``--tokens``.
- debian: the sources (*.rst.txt) of linux-doc and of Python's documentation below ``--debian``, the folder of installed
  or unpacked packages. Skipped with a message if there are none.

The other ways are Megatron's concatenation of shuffled documents, best-fit packing by length, and a path of nearest
neighbours.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.data.corpus.neighbours import nearest_centres
from bytescale_ext.data.corpus.sculpting import embedded_pieces
from bytescale_ext.data.corpus.tokens import CorpusTokens, open_tokens
from bytescale_ext.data.samples.sources import environment_entries
from bytescale_ext.data.samples.texts import encoder
from bytescale_ext.draw.sculpt import draw_clusters
from bytescale_ext.plan.sculpt.baselines import concatenated, fitted, neighbour_path
from bytescale_ext.plan.sculpt.check import check_windows
from bytescale_ext.plan.sculpt.pieces import OVERFLOWS, Pieces, Table
from bytescale_ext.plan.sculpt.quality import Quality, quality_of
from bytescale_ext.plan.sculpt.sculpt import SculptSettings, sculpt
from megatron.bytescale.cli.shared.inputs import check_picture, size
from scripts.bench.progress import progress

SEED = 1234


@dataclass(frozen=True)
class Row:
    """The figures of one way to make windows, and its seconds without the embedding."""

    quality: Quality
    seconds: float


@dataclass(frozen=True)
class Bench:
    """The figures of a corpus: its sizes, the seconds of the embedding, and a row for each way."""

    documents: int
    tokens: int
    embed_seconds: float
    rows: dict[str, Row]


def python_texts() -> Iterator[bytes]:
    """Yield the Python files of the environment in random order."""
    entries = environment_entries("*.py")
    for i in np.random.RandomState(SEED).permutation(len(entries)).tolist():
        yield entries[i].path.read_bytes()


def debian_texts(root: Path) -> Iterator[bytes]:
    """Yield the sources of documentation of the packages below ``root``, sorted by path."""
    folders = sorted([*root.glob("linux-doc*"), *root.glob("python3*")])
    for path in sorted(path for folder in folders for path in folder.rglob("*.rst.txt")):
        yield path.read_bytes()


def write_corpus(prefix: Path, texts: Iterator[bytes], num_tokens: int) -> CorpusTokens | None:
    """Write byte-level documents up to a number of tokens; return None if there are no texts."""
    from megatron.bytescale.core.datasets.corpus import write_tokens

    encode, total, documents = encoder(None), 0, []
    for text in texts:
        if total >= num_tokens:
            break
        documents.append(encode(text)[0])
        total += len(documents[-1])
    if not documents:
        return None
    write_tokens(prefix, documents)
    return open_tokens(str(prefix))


def measure(corpus: CorpusTokens, context: int, plot: Path | None = None) -> Bench:
    """Make windows in every way, and check that each token is in the right number of windows."""
    began = time.perf_counter()
    pieces = embedded_pieces(corpus, context, None, SEED)
    seconds = time.perf_counter() - began
    ways: dict[str, tuple[str, Callable[[], Table]]] = {
        "concatenation (Megatron)": ("split", lambda: concatenated(pieces, context, SEED)),
        "best fit by length": ("none", lambda: fitted(pieces, context)),
        "path of nearest neighbours": ("split", lambda: neighbour_path(pieces, context)),
    }
    ways |= {
        f"sculpt, {overflow}": (overflow, partial(sculpted, pieces, SculptSettings(context, overflow, SEED)))
        for overflow in OVERFLOWS
    }
    rows = {}
    for way in progress(list(ways)):
        overflow, make = ways[way]
        began = time.perf_counter()
        table = make()
        way_seconds = time.perf_counter() - began
        rows[way] = Row(quality_of(table, pieces, context), way_seconds)
        check_windows(table, corpus.lengths, context, overflow)
    if plot is not None:
        draw_clusters(pieces.vectors, sculpt(pieces, SculptSettings(context, seed=SEED)).cluster, pieces.length, plot)
    return Bench(len(corpus.lengths), int(corpus.lengths.sum()), seconds, rows)


def sculpted(pieces: Pieces, settings: SculptSettings) -> Table:
    """Return the windows of ``bytescale data sculpt``."""
    return sculpt(pieces, settings, nearest_centres).table


def text_of(name: str, bench: Bench) -> str:
    """Return the table of a corpus."""
    base = next(iter(bench.rows.values())).quality.relevance
    lines = [
        f"{name}: {bench.documents:,} documents of {bench.tokens:,} bytes, embedded in {bench.embed_seconds:.1f} s",
        "| windows by | number | fill | relevance | over concatenation | cut | documents a window | kept | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for way, row in bench.rows.items():
        quality = row.quality
        lines.append(
            f"| {way} | {quality.num_windows:,} | {quality.fill:.3f} | {quality.relevance:.3f} | "
            f"{quality.relevance / base:.2f} | {quality.cut:.1%} | {quality.documents_per_window:.1f} | "
            f"{quality.tokens_kept:.3f} | {row.seconds:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure each corpus and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=size, default=65536, metavar="N", help="tokens of a window (64K)")
    parser.add_argument("--tokens", type=size, default=50_000_000, metavar="N", help="bytes of a corpus (50,000,000)")
    parser.add_argument("--corpora", nargs="+", choices=("python", "debian"), default=("python", "debian"))
    parser.add_argument("--debian", type=Path, default=Path("/usr/share/doc"), help="folder of the packages' texts")
    parser.add_argument("--plot", type=Path, metavar="F.png", help="draw the clusters of the last corpus")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    check_picture("--plot", args.plot)
    benches = {}
    for name in args.corpora:
        texts = python_texts() if name == "python" else debian_texts(args.debian)
        with tempfile.TemporaryDirectory() as folder:
            corpus = write_corpus(Path(folder, name), texts, args.tokens)
            if corpus is None:
                print(f"{name}: skipped, no linux-doc or python3-doc below {args.debian}", file=sys.stderr)
                continue
            benches[name] = measure(corpus, args.seq_length, args.plot if name == args.corpora[-1] else None)
        if not args.json:
            print(text_of(name, benches[name]))
    if args.json:
        print(json.dumps({name: asdict(bench) for name, bench in benches.items()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
