"""Measure what overlapped messages gain for virtual stages in slices, over messages in line, in one run.

Processes run Megatron's interleaved schedule over slices with real messages. Passes are waits, as for the host of a
GPU, so that stages do not compete for the cores of one machine; only messages take processor time. Both arms run in
turns, in the same processes.

    .venv/bin/python scripts/bench/pipeline/virtual_messages.py [--stages 4] [--megabytes 4] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from bytescale_ext.plan.schedule.actions import Action, SliceSchedule  # noqa: E402
from bytescale_ext.plan.schedule.check import checked_schedule  # noqa: E402
from bytescale_ext.plan.schedule.simulate import simulate_slices  # noqa: E402
from bytescale_ext.plan.step.sizes import Slicing  # noqa: E402
from scripts.bench.plan.launch import printed_by  # noqa: E402

FLOAT_BYTES = 4
HIDDEN = 1024
NUM_CHUNKS = 2


def schedule_of(args: argparse.Namespace) -> SliceSchedule:
    """Return what the stages run."""
    return checked_schedule(args.stages, args.micro_batches, Slicing(args.slices), NUM_CHUNKS)


def rank_main(args: argparse.Namespace) -> None:
    """Run one process: both arms in turns; the first process prints the seconds of each step."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.bytescale.core.pipeline_parallel.p2p_communication import stage_communicator
    from megatron.bytescale.core.pipeline_parallel.stand_in import join_stages, run_stage, stage_config

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    links, schedule = join_stages(world), schedule_of(args)
    num_rows = int(args.megabytes * 1e6 / FLOAT_BYTES / HIDDEN)
    tensor = torch.zeros(num_rows, 1, HIDDEN)

    def passes(action: Action, _: torch.Tensor | None) -> torch.Tensor:
        time.sleep(args.milliseconds / 1e3 * (1 if action.kind == "F" else 2))
        return tensor.clone()

    seconds: dict[str, list[float]] = {"in line": [], "overlapped": []}
    for turn in range(args.rounds + 1):
        for name, of_arm in seconds.items():
            config = stage_config(schedule, name == "overlapped", HIDDEN)
            arm_links = links if name == "overlapped" else None
            communicator = stage_communicator(config, schedule, lambda _: num_rows, arm_links)
            dist.barrier()
            began = time.perf_counter()
            run_stage(schedule, rank, communicator, passes)
            dist.barrier()
            of_arm += [time.perf_counter() - began] if turn else []
    if rank == 0:
        print(f"\nSECONDS {json.dumps(seconds)}", flush=True)


def main() -> int:
    """Measure and print; with --json the last line is a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages, of 2 virtual stages (%(default)s)")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step (%(default)s)")
    parser.add_argument("--slices", type=int, default=4, help="of a micro-batch (%(default)s)")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of a message (%(default)s)")
    parser.add_argument("--milliseconds", type=float, default=10.0, help="of a forward pass (%(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each arm (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, last line")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args)
        return 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.stages}"]
    words = [word for word in sys.argv[1:] if word != "--json"]
    text = printed_by([*launch, __file__, "--rank", *words])
    found = next(line for line in text.splitlines() if line.startswith("SECONDS "))
    seconds = json.loads(found.removeprefix("SECONDS "))
    costs = {"F": args.milliseconds / 1e3, "B": 2 * args.milliseconds / 1e3}
    ratios = [line / beside for line, beside in zip(seconds["in line"], seconds["overlapped"], strict=True)]
    ideal = simulate_slices(schedule_of(args), lambda _, action: costs[action.kind])
    figures = {
        "step_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "step_seconds_without_messages": ideal.makespan,
        "overlapped_over_in_line": statistics.median(ratios),
        "ratios": (min(ratios), max(ratios)),
    }
    for name, value in figures.items():
        print(f"{name:30} {value}")
    if args.json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
