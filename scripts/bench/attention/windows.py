"""Compare attention with a sliding window to full attention in one run: the ratio of their times and of their work.

    OMP_NUM_THREADS=1 python scripts/bench/attention/windows.py             # 8,192 tokens, on CPU in about a minute
    python scripts/bench/attention/windows.py --tokens 131072 --dtype bf16  # on a GPU

The work is the number of pairs of a query and a key that it sees. Each row is one sequence on D virtual ranks, run in
turn on one device, forward and backward; the time of D ranks is that of all of them together. Both layouts take turns,
and times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import torch

from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.kernels.contract import Saved
from bytescale_ext.attention.kernels.table import choose_kernel
from bytescale_ext.attention.layouts.layout import AttentionLayout, attention_layout
from bytescale_ext.attention.ring import backward_steps, forward_steps
from bytescale_ext.attention.virtual import mailbox_comms, run_in_turn
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADS, KV_HEADS, DIM = 8, 2, 64


def pairs(num_tokens: int, window: int | None) -> int:
    """Return the pairs of a query and a key that it sees in one sequence."""
    seen = num_tokens if window is None else min(num_tokens, window + 1)
    return seen * (seen + 1) // 2 + (num_tokens - seen) * seen


def layouts_of(num_tokens: int, width: int, window: int | None) -> list[AttentionLayout]:
    """Return the layouts of the members of a ring that shares one sequence."""
    ring = tuple(range(width))
    shards = [Shard(0, zigzag_ranges(num_tokens, width, rank), ring) for rank in ring]
    return [
        attention_layout(MicroBatch((shard,)), rank, (num_tokens,), shard.num_tokens, window)
        for rank, shard in enumerate(shards)
    ]


def seconds(layouts: Sequence[AttentionLayout], device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds of the forward and backward pass of all ranks."""
    kernel = choose_kernel(device, dtype, DIM, windows=True).kernel
    backends = [Backend(comm, kernel, DIM**-0.5) for comm in mailbox_comms(len(layouts))]
    generator = torch.Generator(device).manual_seed(0)
    inputs = [
        [
            torch.randn(layout.num_rows, heads, DIM, generator=generator, device=device).to(dtype)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        ]
        for layout in layouts
    ]
    start = _now(device)
    ranks = list(zip(inputs, layouts, backends, strict=True))
    outputs = run_in_turn([forward_steps(*qkv, layout, backend) for (*qkv, _), layout, backend in ranks])
    run_in_turn(
        [
            backward_steps(dout, Saved(*qkv, *output), layout, backend)
            for ((*qkv, dout), layout, backend), output in zip(ranks, outputs, strict=True)
        ]
    )
    return _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(num_tokens: int, window: int, width: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the row of one window and width."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    both = [layouts_of(num_tokens, width, one) for one in (None, window)]
    found = [[seconds(layouts, device, dtype) for layouts in both] for _ in range(options.repeats + 1)][1:]
    full, limited = (statistics.median(column) for column in zip(*found, strict=True))
    return {
        "tokens": num_tokens,
        "window": window,
        "ranks": width,
        "full_ms": full * 1e3,
        "window_ms": limited * 1e3,
        "time_ratio": full / limited,
        "work_ratio": pairs(num_tokens, None) / pairs(num_tokens, window),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print one row for each window and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, metavar="N")
    parser.add_argument("--windows", type=int, nargs="+", default=[1024, 256], metavar="N")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4], metavar="D")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON line at the end")
    options = parser.parse_args(argv)
    rows = [measure(options.tokens, window, width, options) for window in options.windows for width in options.widths]
    print("  tokens  window  ranks  full ms  window ms  time ratio  work ratio")
    for row in rows:
        print(
            f"{row['tokens']:8,} {row['window']:7,} {row['ranks']:6} {row['full_ms']:8.1f} {row['window_ms']:10.1f} "
            f"{row['time_ratio']:11.2f} {row['work_ratio']:11.2f}"
        )
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
