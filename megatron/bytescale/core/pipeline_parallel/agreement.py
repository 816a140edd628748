"""Checks that all ranks have the same plan before a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from megatron.training.utils import print_rank_0

from bytescale_ext.data.loading.step import StepBatch
from bytescale_ext.errors import PlanError
from bytescale_ext.parallel.agreement import compare_plans, digests_by_rank
from megatron.bytescale.runtime import Runtime

COMPARED_EVERY: Final = 100
"""Steps from one comparison of plans to the next."""


def agree_on_plan(runtime: Runtime, step: StepBatch, simple_step: Callable[[StepBatch], StepBatch]) -> StepBatch:
    """Return the step that all ranks run: ``step``, or ``simple_step(step)``. Collective on all processes.

    Plans are compared in the first step of a run and in every ``COMPARED_EVERY``-th step after it. With
    ``--hdp-plan-seconds`` they are compared in every step, since some ranks may not finish planning in time. In other
    steps nothing is sent.

    Raises:
        PlanError: the plans differ, so some ranks have read other data or run other code.
    """
    config = runtime.hdp
    timed = config.plan_seconds is not None
    if not timed and runtime.log.plans_compared and step.step_index % COMPARED_EVERY:
        return step
    runtime.log.plans_compared = True
    digest = step.plan.digest()
    agreement = compare_plans(digest, step.fell_back, None, runtime.device)
    if agreement.fell_back:
        _warn_once(runtime)
        return simple_step(step)
    if not agreement.same_plan:
        ranks = digests_by_rank(digest, None)
        raise PlanError(
            f"ranks have different plans of step {step.step_index + 1}: {_differences(ranks)}; give all of them the "
            "same data, flags and code"
        )
    return step


def _warn_once(runtime: Runtime) -> None:
    if runtime.log.warned_of_time:
        return
    runtime.log.warned_of_time = True
    print_rank_0(
        f"> bytescale: a plan was not ready after --hdp-plan-seconds {runtime.hdp.plan_seconds:g}; the simple plan "
        "(--hdp-balance none) takes its place in such steps. Printed once; give the planner more time to balance them"
    )


def _differences(ranks: dict[str, list[int]], limit: int = 8) -> str:
    parts = []
    for digest, who in ranks.items():
        more = f" and {len(who) - limit} more" if len(who) > limit else ""
        parts.append(f"{digest} on processes {', '.join(map(str, who[:limit]))}{more}")
    return "; ".join(parts[:limit])
