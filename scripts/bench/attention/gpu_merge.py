"""Measure how fast one GPU joins blocks of keys: the fused kernel against torch's operators.

    .venv/bin/python scripts/bench/attention/gpu_merge.py [--json]

A block in bfloat16 is joined to the totals of a ring pass in float32, with 32 heads of 128, as one interval of rows and
as two. Rates count the bytes that must move: totals are read and written, the block is read. ``--device cpu`` tests the
script with torch's operators on tiny sizes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.attention.kernels.contract import Output
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.merge import JoinFunction, choose_join, join_
from scripts.bench.gpu import device_name, gpu_parser, median_seconds, parse_on_gpu
from scripts.bench.progress import progress

HEADS, DIM = 32, 128
TOKENS = (8192, 32768)
TINY_TOKENS = (64,)
REPEATS = 20


def outputs(num_rows: int, dtype: torch.dtype, device: torch.device) -> Output:
    """Return a random output ``[num_rows, heads, dim]`` and its log-sum-exp ``[heads, num_rows]`` in float32."""
    out = torch.randn(num_rows, HEADS, DIM, device=device).to(dtype)
    return out, torch.randn(HEADS, num_rows, device=device)


def moved_bytes(totals: Output, part: Output) -> int:
    """Return the bytes that joining moves: the joined rows of the totals twice, the block once. Any shapes."""
    block_bytes = sum(x.numel() * x.element_size() for x in part)
    return block_bytes + 2 * sum(x.numel() * totals[i].element_size() for i, x in enumerate(part))


def measure(device: torch.device, tokens: Sequence[int], ways: dict[str, JoinFunction]) -> list[dict[str, Any]]:
    """Return a table row for each number of rows, their intervals, and each way to join them."""
    table = []
    for num_rows in progress(tokens, lambda num_rows: f"{num_rows} rows"):
        half = num_rows // 2
        forms = {"one": Rows.of([(0, num_rows)]), "two": Rows.of([(0, half), (num_rows, 2 * num_rows - half)])}
        totals = outputs(2 * num_rows, torch.float32, device)
        part = outputs(num_rows, torch.bfloat16, device)
        for intervals, rows in forms.items():
            for way, join in ways.items():
                seconds = median_seconds(partial(join, totals, part, rows), REPEATS, device.type == "cuda", warm_up=2)
                rate = moved_bytes(totals, part) / seconds / 1e9
                setting = {"num_rows": num_rows, "intervals": intervals, "way": way}
                table.append({**setting, "milliseconds": seconds * 1e3, "gb_per_second": rate})
    return table


def main(words: Sequence[str]) -> None:
    """Measure and print."""
    args = parse_on_gpu(gpu_parser(str(__doc__).splitlines()[0]), words)
    device = torch.device(args.device)
    join, why_not = choose_join(device, torch.bfloat16, DIM)
    if why_not is not None:
        print(f"no fused kernel: {why_not}")
    ways = {"torch": join_, **({} if why_not else {"fused": join})}
    rows = measure(device, TINY_TOKENS if args.quick or args.device == "cpu" else TOKENS, ways)
    for row in rows:
        print(
            f"{row['num_rows']:8} rows in {row['intervals']} interval(s), {row['way']:6} {row['milliseconds']:9.3f} ms "
            f"{row['gb_per_second']:9.1f} GB/s"
        )
    if args.json:
        print(json.dumps({"device": device_name(args.device), "why_not_fused": why_not, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
