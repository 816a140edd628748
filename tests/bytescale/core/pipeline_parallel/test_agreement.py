"""Plans are compared when they must be, and all ranks go on with the same plan, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.parallel.agreement import Agreement
from megatron.bytescale.core.pipeline_parallel import agreement
from megatron.bytescale.core.pipeline_parallel.agreement import COMPARED_EVERY, agree_on_plan
from megatron.bytescale.runtime import Runtime
from tests.bytescale.runtimes import runtime_of
from tests.config.runs import hdp_of
from tests.plan.simple_plans import plan_naive

PLAN = plan_naive([10, 20], 4, 64)


def agreed(runtime: Runtime, step_index: int) -> Any:
    """Return "planned" or "simple": the plan with which a step goes on."""
    step: Any = SimpleNamespace(plan=PLAN, step_index=step_index, fell_back=False, name="planned")
    return agree_on_plan(runtime, step, lambda step: SimpleNamespace(name="simple")).name


def test_a_planner_without_time_gives_all_ranks_the_simple_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step is compared, and the ranks whose planner was in time have other plans."""
    answers = iter([Agreement(True, False), Agreement(False, True), Agreement(True, True)])
    monkeypatch.setattr(agreement, "compare_plans", lambda *_: next(answers))
    runtime = runtime_of(hdp_of(plan_seconds=60.0))
    assert [agreed(runtime, step_index) for step_index in range(3)] == ["planned", "simple", "simple"]
    assert capsys.readouterr().out.count("a plan was not ready after --hdp-plan-seconds 60; the simple plan") == 1


def test_plans_are_compared_in_the_first_step_and_then_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(agreement, "compare_plans", lambda *_: asked.append(None) or Agreement(True, False))
    runtime, counts = runtime_of(hdp_of()), []
    for step_index in (7, 8, COMPARED_EVERY - 1, COMPARED_EVERY, COMPARED_EVERY + 1):
        assert agreed(runtime, step_index) == "planned"
        counts.append(len(asked))
    assert counts == [1, 1, 1, 2, 2]


def test_different_plans_name_some_processes_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "compare_plans", lambda *_: Agreement(False, False))
    monkeypatch.setattr(agreement, "digests_by_rank", lambda *_: {"a": [2], "b": list(range(3, 13))})
    said = r"plans of step 1: a on processes 2; b on processes 3, 4, 5, 6, 7, 8, 9, 10 and 2 more; give all"
    with pytest.raises(PlanError, match=said):
        agreed(runtime_of(hdp_of()), 0)
