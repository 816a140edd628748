"""The gate of gradient reductions: held back in order, begun at the end of the exchanges."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from bytescale_ext.plan.step.plan import StepPlan
from megatron.bytescale.core.distributed import ordered_reductions
from megatron.bytescale.core.distributed.ordered_reductions import begin_reductions, order_reductions
from tests.plan.step.broken_plans import good_rows, plan_of


def bucket_group(overlaps: bool = True) -> Any:
    group = object.__new__(_ParamAndGradBucketGroup)
    group.ddp_config = SimpleNamespace(overlap_grad_reduce=overlaps)
    return group


def runtime_of(plan: StepPlan | None = None, rank: int = 0) -> Any:
    runtime = SimpleNamespace(parts=SimpleNamespace(reductions=None), step=SimpleNamespace(batch=None), rank=rank)
    runtime.add_parts = lambda **parts: vars(runtime.parts).update(parts)
    runtime.hdp = SimpleNamespace(expert_ranks=1)
    runtime.step.batch = SimpleNamespace(plan=plan)
    return runtime


def test_reductions_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, bool | None]] = []
    monkeypatch.setattr(
        _ParamAndGradBucketGroup, "start_grad_sync", lambda self, force=False: begun.append((self.number, force))
    )
    runtime, groups = runtime_of(), [bucket_group() for _ in range(3)]
    chunk: Any = SimpleNamespace(bucket_groups=groups[:2], expert_parallel_bucket_groups=groups[2:])
    assert order_reductions(runtime, [chunk]) == [chunk]
    for number, group in enumerate(groups):
        group.number = number
    gate = runtime.parts.reductions
    groups[0].start_grad_sync()
    assert begun == [(0, False)]
    gate.is_open = False
    groups[2].start_grad_sync(force_all_reduce=True)
    groups[1].start_grad_sync()
    assert begun == [(0, False)]
    gate.open()
    assert begun == [(0, False), (2, True), (1, False)]
    gate.open()
    groups[0].start_grad_sync()
    assert begun[3:] == [(0, False)]


def test_reductions_that_do_not_overlap_stay_as_they_are() -> None:
    runtime, group = runtime_of(), bucket_group(overlaps=False)
    order_reductions(runtime, [SimpleNamespace(bucket_groups=[group], expert_parallel_bucket_groups=[])])  # type: ignore[list-item]
    assert runtime.parts.reductions is None
    assert type(group) is _ParamAndGradBucketGroup
    begin_reductions(runtime, [])


@pytest.mark.parametrize(
    ("rank", "is_first_stage", "num_chunks", "is_open"),
    [(0, True, 1, False), (2, True, 1, True), (2, False, 1, False), (2, True, 2, False)],
)
def test_the_plan_decides(
    rank: int, is_first_stage: bool, num_chunks: int, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 shares its last ring with rank 2, which has further work. Later stages and chunks send messages."""
    monkeypatch.setattr(parallel_state, "is_pipeline_first_stage", lambda ignore_virtual: is_first_stage)
    runtime = runtime_of(plan_of(good_rows()), rank)
    runtime.parts.reductions = ordered_reductions.ReductionGate()
    chunks: Any = [SimpleNamespace()] * num_chunks
    begin_reductions(runtime, chunks)
    assert runtime.parts.reductions.is_open == is_open
