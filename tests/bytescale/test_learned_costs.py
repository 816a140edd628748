"""Learning of costs after a step. tests/e2e/hdp/test_learning.py tests whole runs."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from megatron.bytescale.learned_costs import learn_costs, learner_of
from tests.bytescale.test_runtime import runtime, step_of


@pytest.mark.parametrize(("shares_prompts", "is_learned"), [(False, True), (True, False)])
def test_nothing_is_learned_from_groups_with_one_prompt(shares_prompts: bool, is_learned: bool) -> None:
    made = runtime()
    learner = learner_of(made)
    made.add_parts(learner=learner)
    made.step.batch = replace(step_of(made), shares_prompts=shares_prompts)
    measured = dict.fromkeys(range(len(made.step.batch.micro_batches)), 0.1)
    with (
        mock.patch.object(type(made.parts.clock), "pass_seconds", return_value=measured),
        mock.patch.object(learner, "add") as add,
        mock.patch.object(learner, "end_step", return_value=None),
        mock.patch("megatron.bytescale.learned_costs._write_costs"),
    ):
        learn_costs(made)
    (plan, passes, _), _ = add.call_args
    assert plan is made.step.batch.plan
    assert bool(passes) == is_learned
