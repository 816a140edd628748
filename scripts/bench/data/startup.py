"""Measure how a rank starts on a large data set, and the loader's host time for a step.

    .venv/bin/python scripts/bench/data/startup.py --documents 100000000 --folder DIR [--seq-length 8192] [--json]

DIR gets a data set of random lengths: an ``.idx`` file of 20 bytes per document and a sparse ``.bin`` file. The first
process builds the training split with Megatron's builder and writes the cached index; a second process maps it. Both
report the seconds from imported modules to the data set, the growth of memory that no process shares (``RssAnon``), and
the milliseconds for the samples and the lengths of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

STEP = 500_000
"""Documents of a step."""

_PART = 1 << 22


def main() -> None:
    """Run the benchmark, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10**8)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    prefix = args.folder / f"documents-{args.documents}"
    if args.process:
        print(json.dumps(start(prefix, args.seq_length)))
        return
    if not prefix.with_suffix(".bin").exists():
        write_data_set(prefix, args.documents)
    results = {}
    for name in ("first process", "second process"):
        command = [sys.executable, __file__, "--process", "--folder", str(args.folder)]
        command += ["--documents", str(args.documents), "--seq-length", str(args.seq_length)]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[name] = json.loads(answer.splitlines()[-1])
    if args.json:
        print(json.dumps(results))
        return
    for name, figures in results.items():
        print(f"{name}: " + ", ".join(f"{key} {value:,.4g}" for key, value in figures.items()))


def write_data_set(prefix: Path, num_documents: int) -> None:
    """Write documents of random lengths, most of them short: one of 64 is longer than 8192 tokens."""
    random = np.random.default_rng(1)
    total = 0
    with prefix.with_suffix(".idx").open("wb") as lengths_file, prefix.with_suffix(".idx").open("r+b") as pointers_file:
        lengths_file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, num_documents, num_documents + 1))
        pointers_file.seek(34 + 4 * num_documents)
        for begin in range(0, num_documents, _PART):
            count = min(_PART, num_documents - begin)
            lengths = random.integers(1, 2000, count, dtype=np.int32)
            lengths[random.integers(0, 64, count) == 0] += 20_000
            ends = np.cumsum(lengths, dtype=np.int64) + total
            lengths.tofile(lengths_file)
            ((ends - lengths) * 2).tofile(pointers_file)
            total = int(ends[-1])
        for begin in range(0, num_documents + 1, _PART):
            np.arange(begin, min(begin + _PART, num_documents + 1), dtype=np.int64).tofile(pointers_file)
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(2 * total)


def start(prefix: Path, seq_length: int) -> dict[str, float]:
    """Return the figures of one process."""
    from bytescale_ext.data.samples.packed import lengths_of
    from megatron.bytescale.core.datasets.document_dataset import DocumentConfig, build_document_datasets

    anonymous, seconds, processor = own_memory(), time.perf_counter(), time.process_time()
    blend = ([str(prefix)], None)
    config = DocumentConfig(random_seed=1, sequence_length=seq_length, blend=blend, split="98,1,1")
    source = build_document_datasets(config, [10 * STEP, STEP, 0], lambda: True)[0]
    assert source is not None
    figures = {
        "seconds": time.perf_counter() - seconds,
        "processor seconds": time.process_time() - processor,
        "MB of its own": (own_memory() - anonymous) / 1e6,
    }
    times = []
    for step in range(8):
        began = time.perf_counter()
        lengths_of(source, range(step * STEP, (step + 1) * STEP))
        times.append(time.perf_counter() - began)
    return figures | {"ms for lengths": 1000 * min(times), "MB with steps": (own_memory() - anonymous) / 1e6}


def own_memory() -> int:
    """Return the bytes of this process's memory that no file backs."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
