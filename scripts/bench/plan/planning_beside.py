"""Measure how much planning slows training: launches of small operations beside a planner thread or process.

    python scripts/bench/plan/planning_beside.py

Launches are torch's additions of 64 numbers on the CPU, one after another in the main thread; the planner makes the
pipeline plans of docs/results/simulated.md (Byted's lengths, 256K, 64 pipelines of 4 stages in 12 slices). Needs no
GPU, two cores and a minute.
"""

from __future__ import annotations

import argparse
import threading
import time

import torch

from bytescale_ext.data.loading.planning import Planner, PlannerInProcess
from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.evaluate.schedulers import stage_costs
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.sizes import Cluster, Slicing

K, M = 1 << 10, 1 << 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=200_000, metavar="N", help="in each of 3 runs (200000)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stages = stage_costs(shipped("bytescale_7b"), 4)
    planner = HdpPlanner(Cluster(64, 8 * K), stages, Slicing(12, 2 * M, True), balance="pp")
    lengths = tuple(sample_lengths("byted", 256 * K, 4 * M, 0).tolist())
    began = time.perf_counter()
    digest = planner(lengths).digest()
    print(f"a plan takes {time.perf_counter() - began:.2f} s")
    in_process = PlannerInProcess(planner, slow_seconds=0.0)
    assert [in_process(lengths).digest() for _ in range(2)] == [digest] * 2
    launches(args.launches)
    alone = least_seconds(args.launches)
    print(f"alone: {alone / args.launches * 1e6:.2f} us a launch")
    for name, one in (("thread", planner), ("process", in_process)):
        print(f"beside a planning {name}: {beside(one, lengths, args.launches) / alone:.2f} times as long")


def beside(planner: Planner, lengths: tuple[int, ...], count: int) -> float:
    """Return the seconds of the launches while another thread asks for one plan after another."""
    has_ended = threading.Event()

    def plan() -> None:
        while not has_ended.is_set():
            planner(lengths)

    thread = threading.Thread(target=plan)
    thread.start()
    try:
        time.sleep(0.2)
        return least_seconds(count)
    finally:
        has_ended.set()
        thread.join()


def least_seconds(count: int) -> float:
    """Return the shortest of three runs."""
    return min(launches(count) for _ in range(3))


def launches(count: int) -> float:
    """Return the seconds of ``count`` operations."""
    ones = torch.ones(64)
    total = ones
    began = time.perf_counter()
    for _ in range(count):
        total = torch.add(total, ones)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
