"""Measure how long a step reads its rows of an n-gram table: from the device, from the host, and from a cache.

    .venv/bin/python scripts/bench/states/gpu_ngram.py [--json]
    OMP_NUM_THREADS=1 .venv/bin/python scripts/bench/states/gpu_ngram.py --device cpu --rows 10M --tokens 8K

All arms read the same rows with one worker, and update them after each step with gradients of ones:

- **device**: the table is on the device.
- **host**: every step gathers all its rows on the host and copies them.
- **cached**: a cache of a tenth of the rows answers first.
- **ahead**: as cached, but the rows of the next step are fetched before, in time that does not count.

The frequency of rows follows Zipf's law. The script also measures the start of the table and its memory, and compares
the memory with the forecast of the training.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.config.memory.tables import HostTables
from bytescale_ext.states.cache import CacheSettings, RowCache
from bytescale_ext.states.rows import Push, RowTable
from megatron.bytescale.cli.shared.inputs import count, size
from scripts.bench.gpu import gpu_parser, parse_on_gpu, repeated_seconds
from scripts.bench.progress import progress

RATE, SHARE, COLUMNS = 0.01, 0.1, 8
Step = tuple[np.ndarray, np.ndarray]
"""Rows int64 [n] of a step, ascending, and the index of the row that each token reads, int64 [tokens * columns]."""


def drawn_steps(num_rows: int, tokens: int, num_steps: int, seed: int) -> list[Step]:
    """Return random steps; the frequency of their rows [n] follows Zipf's law with exponent 1.1."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(num_steps):
        ranks = np.minimum(rng.zipf(1.1, tokens * COLUMNS), num_rows) - 1
        rows, places = np.unique(ranks * 2_654_435_761 % num_rows, return_inverse=True)
        steps.append((rows, places))
    return steps


def to_device(values: np.ndarray, places: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the values float32 [n, dim] in the order of ``places``, on the device: [tokens * columns, dim]."""
    rows, names = torch.from_numpy(values), torch.from_numpy(places)
    if device.type == "cuda":
        rows, names = rows.pin_memory().to(device, non_blocking=True), names.to(device)
    return functional.embedding(names, rows)


def seconds_of(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Return the seconds until the result [n, dim] of some work is on the device."""
    return repeated_seconds(work, 1, device.type == "cuda", warm_up=0)[0]


def read_on_device(table: RowTable, steps: list[Step], device: torch.device) -> list[float]:
    """Return the seconds of each step with the table [rows, dim] on the device."""
    weight, seconds = torch.from_numpy(table.values).to(device), []
    for rows, places in steps:
        names = torch.from_numpy(rows[places]).to(device)
        seconds.append(seconds_of(partial(functional.embedding, names, weight), device))
    return seconds


def read_on_host(table: RowTable, steps: list[Step], device: torch.device) -> list[float]:
    """Return the seconds of each step that gathers its rows [n, dim] on the host."""

    def gather(rows: np.ndarray, places: np.ndarray) -> torch.Tensor:
        return to_device(table.values[rows], places, device)

    seconds = []
    for rows, places in steps:
        seconds.append(seconds_of(partial(gather, rows, places), device))
        ones = np.ones((len(rows), table.values.shape[1]), np.float32)
        table.apply([Push(rows, ones, np.ones(len(rows), np.int64), np.ones(len(rows), np.float32))], RATE)
    return seconds


def read_cached(table: RowTable, steps: list[Step], device: torch.device, ahead: bool) -> list[float]:
    """Return the seconds of each step that reads its rows [n, dim] through a cache; ``ahead`` fetches them before."""
    num_rows, dim = table.values.shape
    cache = RowCache(CacheSettings(int(SHARE * num_rows)), num_rows, dim)

    def look_up(rows: np.ndarray, places: np.ndarray) -> torch.Tensor:
        return to_device(cache.lookup(rows, table, RATE), places, device)

    seconds = []
    for number, (rows, places) in enumerate(steps):
        seconds.append(seconds_of(partial(look_up, rows, places), device))
        if ahead and number + 1 < len(steps):
            cache.stage(steps[number + 1][0], table)
        table.apply([cache.update(rows, np.ones((len(rows), dim), np.float32), RATE)], RATE)
    return seconds


def start(num_rows: int, dim: int) -> tuple[RowTable, dict[str, float]]:
    """Return a table, and the seconds and bytes that it and its cache take, with the forecast."""
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    table = RowTable.random(range(num_rows), dim, 0.02, 0)
    cache = RowCache(CacheSettings(int(SHARE * num_rows)), num_rows, dim)
    seconds = time.perf_counter() - begun
    arrays = [value for value in vars(cache).values() if isinstance(value, np.ndarray)]
    for array in (table.squares, table.versions, *arrays):
        array.fill(0)  # so that all pages exist
    num_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    forecast = HostTables(cache.settings, RATE).num_bytes(num_rows, dim, 1)
    return table, {"seconds": seconds, "bytes": num_bytes, "forecast_bytes": forecast}


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = gpu_parser(str(__doc__).splitlines()[0])
    parser.add_argument("--rows", type=size, default=10_000_000, metavar="N", help="rows of the table (10M)")
    parser.add_argument("--dim", type=count, default=64, metavar="N", help="numbers of a row (64)")
    parser.add_argument(
        "--tokens", type=size, default=32_768, metavar="N", help=f"of a step, {COLUMNS} rows each (32K)"
    )
    parser.add_argument("--steps", type=count, default=10, metavar="N", help="of each arm; the last half counts (10)")
    return parse_on_gpu(parser)


def main() -> int:
    """Measure and print."""
    args = options()
    device = torch.device(args.device)
    table, started = start(args.rows, args.dim)
    print(
        f"start {started['seconds']:.1f} s; memory {started['bytes'] / 1e9:.3f} GB, "
        f"{started['bytes'] / started['forecast_bytes']:.3f} of the forecast"
    )
    steps = drawn_steps(args.rows, args.tokens, args.steps, seed=1)
    arms = {
        "device": read_on_device,
        "host": read_on_host,
        "cached": partial(read_cached, ahead=False),
        "ahead": partial(read_cached, ahead=True),
    }
    medians = {}
    for name in progress(list(arms)):
        seconds = arms[name](table, steps, device)
        medians[name] = statistics.median(seconds[len(seconds) // 2 :])
    for name, median in medians.items():
        print(f"{name:>7}: {1e3 * median:9.3f} ms a step, {median / medians['host']:.3f} of the gather on the host")
    if args.json:
        print(json.dumps({"start": started, "seconds": medians}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
