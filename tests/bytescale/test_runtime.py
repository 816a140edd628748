from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bytescale_ext.data.loading.step import StepBatch
from bytescale_ext.data.samples.packed import PackedMicroBatch
from bytescale_ext.measure.metrics import RankStep
from bytescale_ext.parallel.p2p import RingComm
from bytescale_ext.plan.setup.planner import balanced_cost, planner_of
from bytescale_ext.plan.step.micro_batch import MicroBatch
from megatron.bytescale.runtime import Runtime
from tests.bytescale.runtimes import runtime_of
from tests.config.runs import hdp_of

LENGTHS = (250, 3, 60, 130, 64)


def runtime(rank: int = 0, **changes: Any) -> Runtime:
    return runtime_of(hdp_of(rows_multiple=2, **changes), comm=RingComm(None, rank, 4))


def packed(micro_batch: MicroBatch, num_rows: int) -> PackedMicroBatch:
    rows = torch.zeros(num_rows, dtype=torch.int64)
    names = tuple(f"docs: document {shard.seq}" for shard in micro_batch.shards)
    return PackedMicroBatch(rows, rows, rows, rows.float(), micro_batch, names)


def step_of(made: Runtime, padding: int = 1) -> StepBatch:
    plan = planner_of(made.run.decision)(LENGTHS)
    mine = tuple(packed(one, one.num_tokens + padding) for one in plan.ranks[made.rank])
    return StepBatch(0, tuple(range(len(LENGTHS))), plan, mine, wait_seconds=0.25)


def test_figures_of_a_step_are_counted_once() -> None:
    made = runtime(rank=1)
    assert made.parts.comm is not None
    for steps in (1, 2):
        made.parts.comm.stats.bytes_sent = made.parts.kernel_calls.num_forward = (
            1_000_000  # from an evaluation in between
        )
        made.reset_counts()
        made.step.batch = step = step_of(made)
        made.parts.comm.stats.bytes_sent = 1000
        made.parts.kernel_calls.num_forward, made.parts.kernel_calls.num_backward = 3, 4
        made.count_step()
        mine = step.plan.ranks[1]
        assert mine
        assert made.log.totals.num_steps == steps
    num_tokens = sum(micro_batch.num_tokens for micro_batch in mine)
    cost = balanced_cost(made.run.decision).both
    assert made.log.totals.figures == RankStep(
        work_seconds=0.0,
        planned_work=pytest.approx(2 * sum(cost.micro_batch_cost(one, LENGTHS) for one in mine), rel=1e-12),
        num_micro_batches=2 * len(mine),
        num_tokens=2 * num_tokens,
        num_rows=2 * (num_tokens + len(mine)),
        plan_wait_seconds=0.5,
        bytes_sent=2000,
        attention_calls=14,
        num_slices=2,
    )
    assert made.log.totals.figures.planned_work > 0


def test_all_ranks_together_count_every_token_once() -> None:
    totals = []
    for rank in range(4):
        made = runtime(rank)
        made.step.batch = step_of(made)
        made.count_step()
        totals.append(made.log.totals.figures.num_tokens)
    assert sum(totals) == sum(LENGTHS)


def test_flops_count_the_experts_that_ran() -> None:
    routed = {"expert_ffn_hidden": 64, "num_experts": 8, "experts_per_token": 2}
    counted = []
    for active in (None, 2.0, 8.0):
        made = runtime()
        made.run = replace(made.run, shape=replace(made.run.shape, num_expert_layers=1, **routed))
        made.step.batch, made.step.active_experts = step_of(made), active
        made.count_step()
        counted.append(made.log.totals.model_flops)
        assert made.log.totals.active_experts == (active or 0.0)
    assert counted[0] == counted[1] < counted[2]


def test_staleness_is_summed() -> None:
    made = runtime()
    made.step.batch = step_of(made)
    for stale in (1, 3, 2):
        made.step.stale_steps = stale
        made.count_step()
    assert (made.log.totals.stale_steps, made.log.totals.most_stale_steps) == (6, 3)
