"""Time the exchange of plain and hierarchical rings: what each rank of ``rings.py`` runs. Needs torchrun's variables.

Real passes of ring attention over all ranks, forward and backward, with a kernel that computes nothing. Both forms take
turns; the time of a pass is that of the slowest rank. Rank 0 prints the median times as one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved, empty_output
from bytescale_ext.attention.kernels.table import Kernel, named_kernel
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.layout import AttentionLayout, attention_layout
from bytescale_ext.attention.ring import backward_steps, drive, forward_steps
from bytescale_ext.parallel.p2p import RingComm
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges

BEGIN = "exchange begins"
"""Printed by rank 0 before the first pass."""

HEADS, DIM = 2, 32


def idle_kernel() -> Kernel:
    """Return a kernel whose results are zeros at once, so that a pass is its exchange."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
        return empty_output(q)

    def backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
        return torch.zeros_like(saved.q), torch.zeros_like(saved.k), torch.zeros_like(saved.v)

    def join(totals: Output, part: Output, rows: object) -> None:
        pass

    kernel = named_kernel("cpu", torch.float32, DIM, "reference")
    return replace(kernel, name="idle", forward=forward, backward=backward, join=join)


def layout_of(num_tokens: int, rank: int, num_ranks: int, inner_rings: int) -> AttentionLayout:
    """Return the layout of one sequence on a ring of all ranks."""
    ring = tuple(range(num_ranks))
    shard = Shard(0, zigzag_ranges(num_tokens, num_ranks, rank), ring, inner_rings)
    return attention_layout(MicroBatch((shard,)), rank, (num_tokens,), shard.num_tokens)


def time_passes(comm: RingComm, layout: AttentionLayout) -> list[float]:
    """Return the seconds of a forward and of a backward pass, of the slowest rank. Collective."""
    backend = Backend(comm, idle_kernel(), DIM**-0.5)
    q, k, v = (torch.zeros(layout.num_rows, HEADS, DIM) for _ in range(3))
    dist.barrier()
    began = time.perf_counter()
    out, lse = drive(forward_steps(q, k, v, layout, backend))
    middle = time.perf_counter()
    dist.barrier()
    again = time.perf_counter()
    drive(backward_steps(torch.zeros_like(out), Saved(q, k, v, out, lse), layout, backend))
    seconds = torch.tensor([middle - began, time.perf_counter() - again], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return [float(one) for one in seconds]


def main() -> None:
    """Time both forms in turn and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, required=True, help="of the sequence")
    parser.add_argument("--repeats", type=int, required=True, help="passes of each form")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    comm = RingComm(None, rank, num_ranks)
    comm.warm_up("cpu")
    forms = {"plain": 1, "hierarchical": num_ranks // int(os.environ["LOCAL_WORLD_SIZE"])}
    layouts = {name: layout_of(args.tokens, rank, num_ranks, inner_rings) for name, inner_rings in forms.items()}
    for layout in layouts.values():  # connects the peers
        time_passes(comm, layout)
    if rank == 0:
        print(BEGIN, flush=True)
    found: dict[str, list[list[float]]] = {name: [] for name in forms}
    for _ in range(args.repeats):
        for name, layout in layouts.items():
            found[name].append(time_passes(comm, layout))
    if rank == 0:
        passes = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
        }
        print(json.dumps(passes), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
