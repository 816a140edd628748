"""Measure how long a step takes to read its rows of an n-gram table: on the device, gathered on the host, and cached.

    .venv/bin/python scripts/bench/states/gpu_ngram.py [--json]
    OMP_NUM_THREADS=1 .venv/bin/python scripts/bench/states/gpu_ngram.py --device cpu --rows 10M --tokens 8K

Arms read the same rows, one worker, and update them after each step with gradients of ones:

- **device**: the table is on the device.
- **host**: every step gathers all its rows on the host and copies them.
- **cached**: a cache of a tenth of the rows answers first.
- **ahead**: as cached, but rows of the next step were fetched before, which is not timed: computing hides it.

How often a row is read follows Zipf's law. The table's start and the memory that it takes are measured too, beside what
the run's check forecasts.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from bytescale_ext.config.memory.host_tables import HostTables  # noqa: E402
from bytescale_ext.states.cache import CacheSettings, RowCache  # noqa: E402
from bytescale_ext.states.rows import Push, RowTable  # noqa: E402
from megatron.bytescale.cli.shared.inputs import count, size  # noqa: E402

RATE, SHARE, COLUMNS = 0.01, 0.1, 8
Step = tuple[np.ndarray, np.ndarray]
"""Rows int64 [n] of a step, ascending, and which of them each column of each token reads, int64 [tokens * columns]."""


def drawn_steps(num_rows: int, tokens: int, num_steps: int, seed: int) -> list[Step]:
    """Return steps, whose rows [n] are ranks of Zipf's law with exponent 1.1, spread over the table."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(num_steps):
        ranks = np.minimum(rng.zipf(1.1, tokens * COLUMNS), num_rows) - 1
        rows, places = np.unique(ranks * 2_654_435_761 % num_rows, return_inverse=True)
        steps.append((rows, places))
    return steps


def timed(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Return the seconds of some work, whose result [n, dim] is awaited on the device."""
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def to_device(values: np.ndarray, places: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return values float32 [n, dim] as each token reads them, [tokens * columns, dim]."""
    rows, names = torch.from_numpy(values), torch.from_numpy(places)
    if device.type == "cuda":
        rows, names = rows.pin_memory().to(device, non_blocking=True), names.to(device)
    return functional.embedding(names, rows)


def read_on_device(table: RowTable, steps: list[Step], device: torch.device) -> list[float]:
    """Return the seconds of each step with the table [rows, dim] on the device."""
    weight, found = torch.from_numpy(table.values).to(device), []
    for rows, places in steps:
        names = torch.from_numpy(rows[places]).to(device)
        found.append(timed(lambda names=names: functional.embedding(names, weight), device))  # type: ignore[misc]
    return found


def read_on_host(table: RowTable, steps: list[Step], device: torch.device) -> list[float]:
    """Return the seconds of each step that gathers its rows [n, dim] on the host."""
    found = []
    for rows, places in steps:
        work = lambda rows=rows, places=places: to_device(table.values[rows], places, device)  # noqa: E731
        found.append(timed(work, device))  # type: ignore[arg-type]
        ones = np.ones((len(rows), table.values.shape[1]), np.float32)
        table.apply([Push(rows, ones, np.ones(len(rows), np.int64), np.ones(len(rows), np.float32))], RATE)
    return found


def read_cached(table: RowTable, steps: list[Step], device: torch.device, ahead: bool) -> list[float]:
    """Return the seconds of each step that reads its rows [n, dim] through a cache, ``ahead``: fetched before."""
    num_rows, dim = table.values.shape
    cache, found = RowCache(CacheSettings(int(SHARE * num_rows)), num_rows, dim), []
    for number, (rows, places) in enumerate(steps):
        work = lambda rows=rows, places=places: to_device(  # noqa: E731
            cache.lookup(rows, table, RATE), places, device
        )
        found.append(timed(work, device))  # type: ignore[arg-type]
        if ahead and number + 1 < len(steps):
            cache.stage(steps[number + 1][0], table)
        table.apply([cache.update(rows, np.ones((len(rows), dim), np.float32), RATE)], RATE)
    return found


def start(num_rows: int, dim: int) -> tuple[RowTable, dict[str, float]]:
    """Return a table, and how long it and its cache took to start and how much memory they took."""
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    table = RowTable.random(range(num_rows), dim, 0.02, 0)
    cache = RowCache(CacheSettings(int(SHARE * num_rows)), num_rows, dim)
    seconds = time.perf_counter() - begun
    arrays = (
        cache.line,
        cache.row,
        cache.version,
        cache.updates,
        cache.values,
        cache.pending,
        cache.squares,
        cache.added,
    )
    for one in (table.squares, table.versions, *arrays, cache._uses, cache._last_use):
        one.fill(0)  # so that all pages exist
    cache.row.fill(-1)
    cache.line.fill(-1)
    took = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    forecast = HostTables(cache.settings, RATE).num_bytes(num_rows, dim, 1)
    return table, {"seconds": seconds, "bytes": took, "forecast_bytes": forecast}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=size, default=10_000_000, metavar="N", help="of the table (10M)")
    parser.add_argument("--dim", type=count, default=64, metavar="N", help="numbers of a row (64)")
    parser.add_argument(
        "--tokens", type=size, default=32_768, metavar="N", help=f"of a step, {COLUMNS} rows each (32K)"
    )
    parser.add_argument(
        "--steps", type=count, default=10, metavar="N", help="of each arm; half of them are counted (10)"
    )
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU: give --device cpu")
    device = torch.device(args.device)
    table, started = start(args.rows, args.dim)
    print(
        f"start {started['seconds']:.1f} s; memory {started['bytes'] / 1e9:.3f} GB, "
        f"{started['bytes'] / started['forecast_bytes']:.3f} of the forecast"
    )
    steps = drawn_steps(args.rows, args.tokens, args.steps, seed=1)
    arms = {
        "device": read_on_device(table, steps, device),
        "host": read_on_host(table, steps, device),
        "cached": read_cached(table, steps, device, ahead=False),
        "ahead": read_cached(table, steps, device, ahead=True),
    }
    medians = {name: statistics.median(found[len(found) // 2 :]) for name, found in arms.items()}
    for name, seconds in medians.items():
        print(f"{name:>7}: {1e3 * seconds:9.3f} ms a step, {seconds / medians['host']:.3f} of the gather on the host")
    if args.json:
        print(json.dumps({"start": started, "seconds": medians}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
