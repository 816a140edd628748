"""Write the tables of docs/results/slices.md: simulated schedules of the paper's models, with published figures.

    .venv/bin/python scripts/bench/pipeline/seq1f1b_table.py [--check]

The tables are pure arithmetic and the same on every machine. The script takes a few seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.new_file import write_text
from bytescale_ext.plan.schedule.compare import PAPER_MODELS, SliceModel, compare_schedules
from bytescale_ext.plan.step.sizes import Slicing
from scripts.bench.report import ROOT

DOCUMENT = ROOT / "docs" / "results" / "slices.md"
BEGIN, END = "<!-- tables: scripts/bench/pipeline/seq1f1b_table.py -->", "<!-- end of tables -->"
NUM_SLICES, NUM_CHUNKS = 4, 2
MEMORY = {
    ("gpt-2.7b", 16384): (51.4, 71.0, 29.8, 29.7), ("gpt-2.7b", 24576): (74.3, None, 41.5, 41.9),
    ("gpt-2.7b", 32768): (None, None, 53.1, 54.5), ("gpt-7b", 32768): (28.0, 34.2, 18.9, 16.4),
    ("gpt-7b", 65536): (51.4, 62.9, 34.3, 28.5), ("gpt-7b", 131072): (None, None, 69.8, 57.6),
    ("gpt-13b", 32768): (44.2, 53.2, 29.7, 25.8), ("gpt-13b", 49152): (64.3, 76.4, 42.4, 35.9),
    ("gpt-13b", 65536): (66.8, None, 51.6, 42.9), ("gpt-30b", 32768): (71.4, None, 37.6, 38.6),
    ("gpt-30b", 49152): (None, None, 54.7, 55.5), ("gpt-30b", 65536): (None, None, 67.5, 66.9),
}  # fmt: skip
"""Published peak memory in GB of 1F1B, 1F1B-I, Seq1F1B, Seq1F1B-I, with weights and optimizer; None: out of memory."""
THROUGHPUT = {
    (32768, 8): (99.7, 109.6, 110.6, 97.7), (32768, 16): (114.5, 116.5, 115.3, 95.6),
    (65536, 8): (107.5, 120.0, 124.6, 117.8), (65536, 16): (124.0, 128.7, 123.1, 118.0),
    (131072, 8): (None, None, 136.7, 135.1), (131072, 16): (None, None, 142.1, 136.6),
}  # fmt: skip
"""Published TFLOP/s per GPU of the 7B model on 32 A100, by tokens and micro-batches."""


def _figure(value: float | None, digits: int = 1) -> str:
    return "out of memory" if value is None else f"{value:.{digits}f}"


def _head(*names: str) -> str:
    return f"| {' | '.join(names)} |\n{'|---' * len(names)}|"


def memory_rows() -> Iterator[str]:
    """Yield rows for every model and length: simulated idle time and activations, published memory."""
    yield _head("model, stages", "tokens", "schedule", "idle, simulated", "activations, micro-batches",
                "activations and key sums, GiB", "peak memory published, GB")  # fmt: skip
    for name, paper in PAPER_MODELS.items():
        for seq_length in paper.seq_lengths:
            model = SliceModel(paper.shape, seq_length, paper.tensor_parallel)
            rows = compare_schedules(model, paper.num_stages, 2 * paper.num_stages, Slicing(NUM_SLICES), NUM_CHUNKS)
            names = ("1F1B", "1F1B-I", "Seq1F1B time", "Seq1F1B-I time")
            published = dict(zip(names, MEMORY[name, seq_length], strict=True))
            for row in rows:
                shown = _figure(published[row.name]) if row.name in published else ""
                yield (
                    f"| {name}, {paper.num_stages} | {seq_length // 1024}K | {row.name} | {row.bubble:.3f} "
                    f"| {row.peak_micro_batches:.2f} | {row.activation_bytes / 2**30:.1f} | {shown} |"
                )


def throughput_rows() -> Iterator[str]:
    """Yield rows for the 7B model: speed over 1F1B, simulated and published."""
    yield _head("tokens", "micro-batches", "schedule", "time over 1F1B's, simulated", "TFLOP/s per GPU, published",
                "over 1F1B, published")  # fmt: skip
    paper = PAPER_MODELS["gpt-7b"]
    for (seq_length, num_micro_batches), published in THROUGHPUT.items():
        model = SliceModel(paper.shape, seq_length, paper.tensor_parallel)
        rows = compare_schedules(model, paper.num_stages, num_micro_batches, Slicing(NUM_SLICES), NUM_CHUNKS)
        rows_with_figure = [row for row in rows if not row.name.endswith("even")]
        for row, value in zip(rows_with_figure, published, strict=True):
            ratio = f"{value / published[0]:.2f}x" if value and published[0] else ""
            yield (
                f"| {seq_length // 1024}K | {num_micro_batches} | {row.name} "
                f"| {row.relative_time / rows[0].relative_time:.2f} | {_figure(value)} | {ratio} |"
            )


def tables() -> str:
    """Return all tables with their headings."""
    models = f"Four models, {NUM_SLICES} slices, {NUM_CHUNKS} virtual stages, twice as many micro-batches as stages"
    parts = {models: memory_rows(), "7B on 32 GPUs: speed": throughput_rows()}
    return "\n\n".join(f"### {heading}\n\n" + "\n".join(rows) for heading, rows in parts.items())


def with_tables(text: str) -> str:
    """Return the document with new tables. Raises ValueError if nothing marks their place."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT} must have the lines {BEGIN} and {END} around its tables")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def main() -> int:
    """Write the tables, or with ``--check`` return 1 if the document is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is not up to date")
    args = parser.parse_args()
    old = DOCUMENT.read_text(encoding="utf-8")
    new = with_tables(old)
    if args.check:
        return int(new != old)
    write_text(DOCUMENT, new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
