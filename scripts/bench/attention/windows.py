"""Measure what a sliding window saves: attention with windows against full attention of the same sequence.

    python scripts/bench/attention/windows.py                  # the GPU if there is one, else one CPU core
    python scripts/bench/attention/windows.py --tokens 8192 --windows 256 1024 --json

"work" is the ratio of the pairs of queries and keys, full over window; "measured" that of the times of a forward and a
backward call of the kernel that training would take, medians of rounds in which all windows take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import torch

from bytescale_ext.attention.kernels.contract import Saved
from bytescale_ext.attention.kernels.table import Kernel, choose_kernel
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens

HEADS, HEAD_DIM = 8, 64


def num_pairs(num_tokens: int, window: int | None) -> int:
    """Return the pairs of a query and a key that it sees; a query has ``window`` keys before its own at most."""
    seen = num_tokens if window is None else min(window + 1, num_tokens)
    return seen * (seen + 1) // 2 + (num_tokens - seen) * seen


def seconds(kernel: Kernel, values: Sequence[torch.Tensor], window: int | None) -> float:
    """Return the time of a forward and a backward call. ``values``: q, k, v, dout ``[tokens, heads, dim]``."""
    q, k, v, dout = values
    offsets = CuSeqlens.of_lengths([len(q)])
    block = AttentionBlock(offsets, offsets, causal=True, scale=HEAD_DIM**-0.5, window=window)
    if q.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    out, lse = kernel.forward(q, k, v, block)
    kernel.backward(dout, Saved(q, k, v, out, lse), block)
    if q.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(device: torch.device, num_tokens: int, windows: Sequence[int], rounds: int) -> list[dict[str, float]]:
    """Return a row for each window: its size, the ratio of the work and that of the times."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernel = choose_kernel(device, dtype, HEAD_DIM, windows=True).kernel
    generator = torch.Generator(device).manual_seed(0)
    shape = (4, num_tokens, HEADS, HEAD_DIM)
    values = torch.randn(shape, generator=generator, device=device, dtype=dtype).unbind()
    arms = [None, *windows]
    taken = [[seconds(kernel, values, window) for window in arms] for _ in range(rounds + 1)][1:]  # without the first
    full, *limited = (statistics.median(column) for column in zip(*taken, strict=True))
    work = num_pairs(num_tokens, None)
    return [
        {"window": window, "work": work / num_pairs(num_tokens, window), "measured": full / one}
        for window, one in zip(windows, limited, strict=True)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="of the sequence (%(default)s)")
    parser.add_argument("--windows", type=int, nargs="+", default=[512, 1024, 4096], help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, last line")
    args = parser.parse_args()
    rows = measure(torch.device(args.device), args.tokens, args.windows, args.rounds)
    print(f"{args.tokens:,} tokens on {args.device}: times as fast as full attention")
    for row in rows:
        print(f"  window {row['window']:>7,}   measured {row['measured']:6.2f}   work {row['work']:6.2f}")
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
