"""Measure how fast blocks of keys are joined on one GPU: the fused kernel against torch's operators.

    .venv/bin/python scripts/bench/attention/gpu_merge.py [--json]

The totals of a ring pass in float32 and a block in bfloat16, 32 heads of 128, as one interval of rows and as several.
Rates count the bytes that must move: totals read and written, block read. ``--device cpu`` runs torch's operators on
tiny sizes, as a test of the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.attention.kernels.contract import Output
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.merge import JoinFunction, choose_join, join_

HEADS, DIM = 32, 128
TOKENS = (8192, 32768)
TINY_TOKENS = (64,)
REPEATS = 20


def outputs(num_rows: int, dtype: torch.dtype, device: torch.device) -> Output:
    """Return a random output ``[num_rows, heads, dim]`` of a dtype and its sums ``[heads, num_rows]`` in float32."""
    out = torch.randn(num_rows, HEADS, DIM, device=device).to(dtype)
    return out, torch.randn(HEADS, num_rows, device=device)


def moved_bytes(totals: Output, part: Output) -> int:
    """Return the bytes that joining must move: the rows of the totals twice, the block once. Outputs of any shape."""
    of_part = sum(x.numel() * x.element_size() for x in part)
    return of_part + 2 * sum(x.numel() * totals[i].element_size() for i, x in enumerate(part))


def median_seconds(run: Callable[[], None], device: torch.device) -> float:
    """Return the median seconds of a run after two to warm up."""
    seconds = []
    for _ in range(REPEATS + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:])


def measure(device: torch.device, tokens: Sequence[int], ways: dict[str, JoinFunction]) -> list[dict[str, Any]]:
    """Return a row for each number of rows, their form and each way to join them."""
    rows = []
    for num_rows in tokens:
        half = num_rows // 2
        forms = {"one": Rows.of([(0, num_rows)]), "two": Rows.of([(0, half), (num_rows, 2 * num_rows - half)])}
        totals = outputs(2 * num_rows, torch.float32, device)
        part = outputs(num_rows, torch.bfloat16, device)
        for intervals, of_form in forms.items():
            for way, join in ways.items():
                seconds = median_seconds(partial(join, totals, part, of_form), device)
                rate = moved_bytes(totals, part) / seconds / 1e9
                found = {"num_rows": num_rows, "intervals": intervals, "way": way}
                rows.append({**found, "milliseconds": seconds * 1e3, "gb_per_second": rate})
    return rows


def main(words: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(words)
    on_cuda = args.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu runs tiny sizes")
    device = torch.device(args.device)
    join, why_not = choose_join(device, torch.bfloat16, DIM)
    if why_not is not None:
        print(f"no fused kernel: {why_not}")
    rows = measure(device, TOKENS if on_cuda else TINY_TOKENS, {"torch": join_, **({} if why_not else {"fused": join})})
    for row in rows:
        print(
            f"{row['num_rows']:8} rows in {row['intervals']} interval(s), {row['way']:6} {row['milliseconds']:9.3f} ms "
            f"{row['gb_per_second']:9.1f} GB/s"
        )
    if args.json:
        name = torch.cuda.get_device_name() if on_cuda else "cpu"
        print(json.dumps({"device": name, "why_not_fused": why_not, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
