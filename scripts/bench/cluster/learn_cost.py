"""Seconds that learning adds to a step of one of many ranks, over the seconds of the step.

    python -m scripts.bench.cluster.learn_cost --ranks 512

One rank of a fake process group, whose collectives return at once, plans steps of 32K tokens a rank for a 7B model,
adds the passes that the replay gives it, and exchanges, fits and stores statistics as in training. The time is
processor time of the training thread. The exchange itself, which overlaps with the next step, is not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from bytescale_ext.measure.learning import EVERY, FIRST_STEP, CostLearner, state_of
from bytescale_ext.plan.cost.learned import LearnedCosts, Learner
from bytescale_ext.plan.hdp.planner import HdpPlanner
from scripts.bench.cluster.learn import PLAN_AHEAD, Case, always, measured_passes

RANK = 5


@contextmanager
def fake_group(num_ranks: int) -> Iterator[None]:
    """Make this process one rank of a process group without other processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def cost_of_learning(num_ranks: int, num_steps: int) -> dict[str, float]:
    """Return milliseconds of learning in a step, seconds of a step, and the share, medians over exchange periods."""
    case = Case(num_ranks // 8, LearnedCosts(), always(np.ones(num_ranks)), num_steps)
    cluster, stage = case.cluster, case.true_stage
    learner = CostLearner(stage, Learner.new(num_ranks), RANK, PLAN_AHEAD)
    planner, random = HdpPlanner(cluster, (stage,)), np.random.default_rng(0)
    learning, steps = [], []
    for index in range(num_steps):
        plan = planner(case.lengths(index))
        seconds, passes = measured_passes(plan, (stage,), np.ones(num_ranks), random)
        began = time.thread_time()
        learner.add(plan, passes[RANK])
        if learner.end_step(index, torch.device("cpu")) is not None:
            state_of(learner.learner, "H100")
        learning.append(time.thread_time() - began)
        steps.append(seconds)
    first = -(-FIRST_STEP // EVERY) * EVERY
    periods = [slice(start, start + EVERY) for start in range(first, num_steps - EVERY + 1, EVERY)]
    mine, whole = (median(sum(values[one]) / EVERY for one in periods) for values in (learning, steps))
    return {"learning_ms": 1e3 * mine, "step_seconds": whole, "share": mine / whole}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512, metavar="N", help="ranks, a multiple of 8 (512)")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps (40)")
    args = parser.parse_args(argv)
    with fake_group(args.ranks):
        print(json.dumps(cost_of_learning(args.ranks, args.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
