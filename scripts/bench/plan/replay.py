"""Check the cost model: run a plan's micro-batches and its whole step, and compare with the simulator.

Two CPU ranks (two GPU ranks if there are two GPUs, one rank on a single GPU) train the demo's model on made-up
documents: short ones in packs, and with two ranks long ones that share a ring. The cost file is measured first, by the
same ranks, as ``bytescale profile`` does, or given with ``--cost-file``. Then the micro-batches run one by one, with
all ranks starting each at the same time, and then the step as in training, until its slowest rank has finished.
Gradients are not reduced. Wall time is measured, the minimum of some repeats, because other work on the machine only
adds time: two CPU ranks need two idle cores. The parts of a step's time are printed too: processor time of the slowest
rank's main thread, processor time of the threads that carry its messages, and waiting.

    .venv/bin/python scripts/bench/plan/replay.py [--cost-file cost.json] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from bytescale_ext.plan.cost.cost_model import CostModel  # noqa: E402
from bytescale_ext.plan.cost.model_cost import ModelCost  # noqa: E402
from bytescale_ext.plan.evaluate.replay import replay, replay_stages  # noqa: E402
from bytescale_ext.plan.hdp.planner import HdpPlanner  # noqa: E402
from bytescale_ext.plan.hdp.table import planner_names  # noqa: E402
from bytescale_ext.plan.step.plan import StepPlan  # noqa: E402
from bytescale_ext.plan.step.sizes import Cluster  # noqa: E402
from scripts.demo import MODEL, num_gpus  # noqa: E402

TARGET = 0.10
"""The largest accepted relative error of the prediction of the step, and of the median one of its micro-batches."""


@dataclass(frozen=True)
class Row:
    """The micro-batches of one coupled group, which share their rings: one member for each of its ranks.

    Attributes:
        members: (rank, index of its micro-batch).
        level: no rank has two groups of one level, and a rank runs its groups by ascending level.
        num_tokens: of all members.
        predicted_seconds: of the slowest member, forward and backward.
        measured_seconds: the same, measured; 0 before it is.
    """

    members: tuple[tuple[int, int], ...]
    level: int
    num_tokens: int
    predicted_seconds: float
    measured_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_seconds / self.measured_seconds


def step_lengths(num_sequences: int, num_ranks: int, tokens_per_rank: int, seed: int) -> list[int]:
    """Return log-normal lengths; with several ranks one in eight is longer than a rank holds."""
    generator = np.random.default_rng(seed)
    short = np.exp(generator.normal(math.log(tokens_per_rank / 6), 1.0, num_sequences))
    lengths = np.clip(short, tokens_per_rank // 32, tokens_per_rank).astype(int)
    if num_ranks > 1:
        lengths[::8] = generator.integers(
            tokens_per_rank, num_ranks * tokens_per_rank, len(lengths[::8]), endpoint=True
        )
    return [int(length) for length in lengths]


def group_rows(plan: StepPlan, both: CostModel) -> list[Row]:
    """Return the plan's coupled groups by ascending level, as predicted."""
    starts = replay(plan, both).starts
    order = sorted((start, rank, index) for rank, row in enumerate(starts) for index, start in enumerate(row))
    members: dict[tuple[int, int], list[tuple[int, int]]] = {}
    group_of_seq: dict[int, tuple[int, int]] = {}
    for _, rank, index in order:
        shared = [shard.seq for shard in plan.ranks[rank][index].shards if len(shard.ring) > 1]
        key = next((group_of_seq[seq] for seq in shared if seq in group_of_seq), (rank, index))
        group_of_seq |= dict.fromkeys(shared, key)
        members.setdefault(key, []).append((rank, index))
    levels = [0] * plan.num_ranks
    rows = []
    for found in members.values():
        level = max(levels[rank] for rank, _ in found)
        for rank, _ in found:
            levels[rank] = level + 1
        micro_batches = [plan.ranks[rank][index] for rank, index in found]
        rows.append(
            Row(
                members=tuple(found),
                level=level,
                num_tokens=sum(one.num_tokens for one in micro_batches),
                predicted_seconds=max(both.micro_batch_cost(one, plan.lengths) for one in micro_batches),
            )
        )
    return sorted(rows, key=lambda row: (row.level, row.members))


def summarize(rows: Sequence[Row], step: dict[str, float]) -> dict[str, Any]:
    """Return the figures of one run; the worst ratio is the one farthest from 1 by its factor."""
    ratios = [row.ratio for row in rows]
    median = statistics.median(ratios)
    ratio = step["predicted_seconds"] / step["measured_seconds"]
    return {
        "micro_batches": {
            "count": len(rows),
            "median_ratio": median,
            "worst_ratio": max(ratios, key=lambda one: abs(math.log(one))),
            "within_target": sum(abs(one - 1) <= TARGET for one in ratios) / len(ratios),
        },
        "step": {**step, "ratio": ratio},
        "reached": abs(median - 1) <= TARGET and abs(ratio - 1) <= TARGET,
    }


def run_rank(args: argparse.Namespace) -> int:
    """Run one rank; the first one prints."""
    from megatron.bytescale import cpu

    world = int(os.environ["WORLD_SIZE"])
    on_cpu = cpu.install_if_wanted(["--cpu"] if num_gpus() < world else []) is not None
    import torch.distributed as dist

    from megatron.bytescale.cli.profile import quiet
    from megatron.bytescale.training.profile import build_model, prepare

    with quiet():
        subject = prepare(MODEL if on_cpu else [*MODEL, "--bf16"], 2 * args.tokens_per_rank, on_cpu)
        model = build_model(subject, subject.shape.num_layers)
        cost = run_cost(args, subject)
        stage = cost.whole()
        lengths = step_lengths(args.num_sequences, world, args.tokens_per_rank, args.seed)
        plan = HdpPlanner(Cluster(world, args.tokens_per_rank), (stage,), balance=args.balance)(lengths)
        rows = time_rows(subject, model, plan, group_rows(plan, stage.both), args.repeats)
        measured = time_step(subject, model, plan, args.repeats)
    step = {"predicted_seconds": replay_stages(plan, [stage]).makespan, **measured}
    if dist.get_rank() == 0:
        show(args, cost, rows, summarize(rows, step))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def run_cost(args: argparse.Namespace, subject: Any) -> ModelCost:
    """Return the given cost file, or one measured by all ranks at the same time, as they work in a step."""
    from bytescale_ext.measure.cost_file import check_same_model, read_cost
    from megatron.bytescale.cli.profile import measured_cost

    if args.cost_file is not None:
        return check_same_model(
            read_cost(args.cost_file), subject.shape, subject.tensor_parallel, subject.dtype, args.cost_file
        )
    return measured_cost(subject, 2 * args.tokens_per_rank, args.repeats)[0]


def time_rows(subject: Any, model: Any, plan: StepPlan, rows: Sequence[Row], repeats: int) -> list[Row]:
    """Return the rows with their measured times. Collective; the ranks start each level together."""
    import torch
    import torch.distributed as dist

    from megatron.bytescale.training.profile import begin_plan, run_micro_batch, seconds_between

    runtime = subject.runtime
    micro_batches = begin_plan(subject, plan)
    mine = {row.level: index for row in rows for rank, index in row.members if rank == runtime.rank}
    seconds = np.full((repeats, len(micro_batches)), math.inf)
    for repeat in range(-1, repeats):  # the first one warms up
        for level in range(max(row.level for row in rows) + 1):
            dist.barrier()
            if level not in mine:
                continue
            marks = run_micro_batch(runtime, model, micro_batches[mine[level]])
            if runtime.clock.on_cuda:
                torch.cuda.synchronize()
            if repeat >= 0:
                seconds[repeat, mine[level]] = sum(seconds_between(marks, subject, by_wall=True))
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, seconds)
    slowest = {row: np.max([everyones[rank][:, index] for rank, index in row.members], axis=0) for row in rows}
    return [replace(row, measured_seconds=float(slowest[row].min())) for row in rows]


def time_step(subject: Any, model: Any, plan: StepPlan, repeats: int) -> dict[str, float]:
    """Return the seconds of the step, the fastest of ``repeats``, and where its slowest rank spent them. Collective."""
    import torch
    import torch.distributed as dist

    from megatron.bytescale.training.profile import begin_plan, run_micro_batch

    micro_batches = begin_plan(subject, plan)
    rounds = []
    for _ in range(repeats):
        dist.barrier()
        clocks = (time.perf_counter, time.thread_time, time.process_time)
        begun = [clock() for clock in clocks]
        for packed in micro_batches:
            run_micro_batch(subject.runtime, model, packed)
        if subject.runtime.clock.on_cuda:
            torch.cuda.synchronize()
        mine = [clock() - start for clock, start in zip(clocks, begun, strict=True)]
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        rounds.append(max(everyones))
    wall, thread, process = min(rounds)
    return {"measured_seconds": wall, "thread_seconds": thread, "process_seconds": process}


def show(args: argparse.Namespace, cost: ModelCost, rows: Sequence[Row], figures: dict[str, Any]) -> None:
    """Print the table, the two verdicts and, with --json, all of it as the last line."""
    print(f"{cost.device}, {cost.dtype}; cost file: {args.cost_file or cost.source}")
    print(f"{'ranks':>8}  {'tokens':>7}  {'measured ms':>11}  {'predicted ms':>12}  {'ratio':>6}")
    for row in rows:
        ranks = ",".join(str(rank) for rank, _ in row.members)
        times = f"{1e3 * row.measured_seconds:11.1f}  {1e3 * row.predicted_seconds:12.1f}  {row.ratio:6.3f}"
        print(f"{ranks:>8}  {row.num_tokens:7d}  {times}")
    found, step = figures["micro_batches"], figures["step"]
    print(
        f"micro-batches: predicted / measured median {found['median_ratio']:.3f}, worst {found['worst_ratio']:.3f}, "
        f"{found['within_target']:.0%} of {found['count']} within {TARGET:.0%}"
    )
    print(
        f"step: measured {1e3 * step['measured_seconds']:.1f} ms, predicted {1e3 * step['predicted_seconds']:.1f} ms, "
        f"predicted / measured {step['ratio']:.3f}"
    )
    if cost.device.startswith("CPU"):
        own, carrying = step["thread_seconds"], step["process_seconds"] - step["thread_seconds"]
        waiting = step["measured_seconds"] - step["process_seconds"]
        print(
            f"      of it the slowest rank's own thread {1e3 * own:.1f} ms, its other threads {1e3 * carrying:.1f} ms, "
            f"waiting {1e3 * waiting:.1f} ms (for its partner, or for a core that others use)"
        )
    if args.json:
        setting = {name: value for name, value in vars(args).items() if name not in ("json", "cost_file")}
        setting |= {"cost": str(args.cost_file) if args.cost_file else None, "num_ranks": int(os.environ["WORLD_SIZE"])}
        every = [asdict(row) for row in rows]
        print(json.dumps({"setting": setting, "device": cost.device, **figures, "rows": every}))


def main() -> int:
    """Start the ranks, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cost-file", type=Path, metavar="FILE", help="a cost file of the demo's model; default: measure"
    )
    parser.add_argument("--tokens-per-rank", type=int, default=2048, metavar="C", help="(%(default)s)")
    parser.add_argument(
        "--num-sequences", type=int, default=32, metavar="N", help="sequences of the step (%(default)s)"
    )
    parser.add_argument("--balance", choices=planner_names(), default="dp", help="planner (%(default)s)")
    parser.add_argument("--repeats", type=int, default=8, metavar="N", help="runs; the fastest counts (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the lengths (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, last line")
    args = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        return run_rank(args)
    num_ranks = 1 if num_gpus() == 1 else 2
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*launch, f"--nproc-per-node={num_ranks}", __file__, *sys.argv[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
