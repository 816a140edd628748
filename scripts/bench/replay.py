"""Is the cost model right? A plan's micro-batches and its whole step, run for real and replayed in the simulator.

Two CPU ranks (two GPUs where there are, one rank on a single GPU) train the demo's model on made-up documents: short
ones in packs, and with two ranks long ones that share a ring. The cost file is measured in the same run on the same
ranks, or given with ``--cost``. First the micro-batches run one by one, all ranks beginning each together; then the
step runs as in training, every rank at its own pace, and ends with its slowest rank. Gradients are not reduced. Times
are the least of some repeats, since other work on the machine only ever adds time.

    .venv/bin/python scripts/bench/replay.py [--cost cost.json] [--json]
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from bytescale_ext.plan.cost import CostModel, ModelCost  # noqa: E402
from bytescale_ext.plan.planner import BALANCES, HdpPlanner  # noqa: E402
from bytescale_ext.plan.replay import replay, replay_stages  # noqa: E402
from bytescale_ext.plan.shapes import StepPlan  # noqa: E402
from scripts.demo import MODEL, num_gpus  # noqa: E402

TARGET = 0.10
"""The prediction of the step, and the median one of its micro-batches, should be this near."""


@dataclass(frozen=True)
class Row:
    """The micro-batches of one class, which share their rings: one member for each rank of it.

    Attributes:
        members: (rank, index of its micro-batch).
        level: no rank has two classes of one level, and a rank runs its classes by ascending level.
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
    """Log-normal lengths, and with several ranks one in eight longer than a rank holds."""
    generator = np.random.default_rng(seed)
    short = np.exp(generator.normal(math.log(tokens_per_rank / 6), 1.0, num_sequences))
    lengths = np.clip(short, tokens_per_rank // 32, tokens_per_rank).astype(int)
    if num_ranks > 1:
        lengths[::8] = generator.integers(
            tokens_per_rank, num_ranks * tokens_per_rank, len(lengths[::8]), endpoint=True
        )
    return [int(length) for length in lengths]


def class_rows(plan: StepPlan, both: CostModel) -> list[Row]:
    """The plan's classes by ascending level, as predicted."""
    starts = replay(plan, both).starts
    order = sorted((start, rank, index) for rank, row in enumerate(starts) for index, start in enumerate(row))
    members: dict[tuple[int, int], list[tuple[int, int]]] = {}
    class_of_seq: dict[int, tuple[int, int]] = {}
    for _, rank, index in order:
        shared = [shard.seq for shard in plan.ranks[rank][index].shards if len(shard.ring) > 1]
        key = next((class_of_seq[seq] for seq in shared if seq in class_of_seq), (rank, index))
        class_of_seq |= dict.fromkeys(shared, key)
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


def summarize(rows: Sequence[Row], step: dict[str, float | None]) -> dict[str, Any]:
    """The figures of one run; the worst ratio is the one farthest from 1 by its factor."""
    ratios = [row.ratio for row in rows]
    median = statistics.median(ratios)
    measured, predicted = step["measured_seconds"], step["predicted_seconds"]
    busy, predicted_busy = step["measured_busy_seconds"], step["predicted_busy_seconds"]
    assert measured is not None and predicted is not None and predicted_busy is not None, f"{step=}"
    ratio = predicted / measured
    return {
        "micro_batches": {
            "count": len(rows),
            "median_ratio": median,
            "worst_ratio": max(ratios, key=lambda one: abs(math.log(one))),
            "within_target": sum(abs(one - 1) <= TARGET for one in ratios) / len(ratios),
        },
        "step": {**step, "ratio": ratio, "busy_ratio": predicted_busy / busy if busy else None},
        "reached": abs(median - 1) <= TARGET and abs(ratio - 1) <= TARGET,
    }


def run_rank(args: argparse.Namespace) -> int:
    """One rank of the run; the first prints."""
    from megatron.bytescale import cpu

    world = int(os.environ["WORLD_SIZE"])
    on_cpu = cpu.install_if_wanted(["--cpu"] if num_gpus() < world else []) is not None
    import torch.distributed as dist

    from megatron.bytescale.cli.profile import quiet
    from megatron.bytescale.training.profile import build_model, prepare

    with quiet():
        subject = prepare(MODEL if on_cpu else [*MODEL, "--bf16"], 2 * args.tokens_per_rank, on_cpu, world)
        model = build_model(subject, subject.shape.num_layers)
        cost = run_cost(args, subject)
        stage = cost.whole()
        lengths = step_lengths(args.num_sequences, world, args.tokens_per_rank, args.seed)
        plan = HdpPlanner(world, args.tokens_per_rank, stage, balance=args.balance)(lengths)
        rows = time_rows(subject, model, plan, class_rows(plan, stage.both), args.repeats)
        measured, busy = time_step(subject, model, plan, args.repeats)
    step = {
        "measured_seconds": measured,
        "predicted_seconds": replay_stages(plan, [stage]).makespan,
        "measured_busy_seconds": busy if on_cpu else None,
        "predicted_busy_seconds": max(replay(plan, stage.both).rank_seconds),
    }
    if dist.get_rank() == 0:
        show(args, cost, rows, summarize(rows, step))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def run_cost(args: argparse.Namespace, subject: Any) -> ModelCost:
    """The cost file that was given, or one measured by all ranks at once, as they all work in a step too."""
    import torch.distributed as dist

    from bytescale_ext import profile
    from bytescale_ext.cost_file import check_same_model, read_cost
    from bytescale_ext.profile_ring import exchanged_bytes_per_second
    from megatron.bytescale.training.profile import kept_bytes_per_token, time_packs

    if args.cost is not None:
        cost = read_cost(args.cost)
        return check_same_model(cost, subject.shape, subject.tensor_parallel, subject.dtype, args.cost)
    mine = time_packs(subject, profile.fitted_lengths(2 * args.tokens_per_rank), args.repeats)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    fits = profile.fit_timings([timing for timings in everyones for timing in timings])
    comm = subject.runtime.comm
    rate = exchanged_bytes_per_second(comm, subject.runtime.device) if comm.size > 1 else math.inf
    kept = kept_bytes_per_token(subject, args.tokens_per_rank)
    where = (subject.device, subject.dtype, subject.tensor_parallel, "measured in this run")
    return profile.model_cost(fits, subject.shape, subject.ring_seconds(rate), kept, *where)


def time_rows(subject: Any, model: Any, plan: StepPlan, rows: Sequence[Row], repeats: int) -> list[Row]:
    """The rows with their measured times. Collective; the ranks begin each level together."""
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
                seconds[repeat, mine[level]] = sum(seconds_between(marks, subject))
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, seconds.min(axis=0).tolist())
    return [
        Row(row.members, row.level, row.num_tokens, row.predicted_seconds, max(everyones[r][i] for r, i in row.members))
        for row in rows
    ]


def time_step(subject: Any, model: Any, plan: StepPlan, repeats: int) -> tuple[float, float]:
    """Of the whole step: wall seconds of its slowest rank, and processor seconds of its busiest. Collective."""
    import torch
    import torch.distributed as dist

    from megatron.bytescale.training.profile import begin_plan, run_micro_batch

    micro_batches = begin_plan(subject, plan)
    rounds = []
    for _ in range(repeats):
        dist.barrier()
        begun, begun_busy = time.perf_counter(), time.thread_time()
        for packed in micro_batches:
            run_micro_batch(subject.runtime, model, packed)
        if subject.runtime.clock.on_cuda:
            torch.cuda.synchronize()
        mine = (time.perf_counter() - begun, time.thread_time() - begun_busy)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        rounds.append(np.max(everyones, axis=0))
    wall, busy = np.min(rounds, axis=0).tolist()
    return wall, busy


def show(args: argparse.Namespace, cost: ModelCost, rows: Sequence[Row], figures: dict[str, Any]) -> None:
    """The table, the two verdicts and, with --json, all of it as the last line."""
    print(f"{cost.device}, {cost.dtype}; cost file: {args.cost or cost.source}")
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
    if step["busy_ratio"] is not None:
        print(
            f"      of it processor time of the busiest rank: measured {1e3 * step['measured_busy_seconds']:.1f} ms, "
            f"predicted / measured {step['busy_ratio']:.3f} (far from the one above where other programs run)"
        )
    if args.json:
        setting = {name: value for name, value in vars(args).items() if name not in ("json", "cost")}
        setting |= {"cost": str(args.cost) if args.cost else None, "num_ranks": int(os.environ["WORLD_SIZE"])}
        every = [asdict(row) for row in rows]
        print(json.dumps({"setting": setting, "device": cost.device, **figures, "rows": every}))


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", type=Path, metavar="FILE", help="a cost file of the demo's model; default: measure")
    parser.add_argument("--tokens-per-rank", type=int, default=2048, metavar="C", help="(%(default)s)")
    parser.add_argument(
        "--num-sequences", type=int, default=32, metavar="N", help="sequences of the step (%(default)s)"
    )
    parser.add_argument("--balance", choices=BALANCES, default="dp", help="planner (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="the least of N counts (%(default)s)")
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
