"""``--record-memory-plan``: the recorded step and the output file are known before training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.plan.memory.plan_file import RecordTo
from megatron.bytescale.arguments.refusals import refuse_conflicts
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.features import enabled, refusals
from tests.bytescale.features.activations.test_activation_memory import RECORD
from tests.bytescale.features.activations.test_flags import MEMO
from tests.bytescale.features.activations.test_memory_plan import parsed

POLICY = (*MEMO, "--swap-fraction", "0.25")


def test_the_step_is_recorded_as_it_is_used(tmp_path: Path) -> None:
    words = ("--record-memory-plan", str(tmp_path / "plan.json"))
    target = resolve(parsed(*POLICY, *words)).get(RecordTo)
    assert target.path == tmp_path / "plan.json"
    assert replace(target.record, activations=RECORD.activations) == RECORD
    without_policy = parsed(*words)
    assert [feature.name for feature in enabled(without_policy)] == ["activations", "memory_record"]
    assert (
        resolve(without_policy).find(ActivationConfig) is not None
    )  # its layers equal the layers of a run with the plan


def test_bad_input(tmp_path: Path) -> None:
    for words, message in (
        (["--record-memory-plan", str(tmp_path / "no" / "plan.json")], "cannot be written; choose a file"),
        (["--record-memory-plan", str(tmp_path)], "cannot be written; choose a file"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve(parsed(*POLICY, *words))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hybrid_data_parallel": True}, "--hybrid-data-parallel: remove it: `bytescale memory-plan` records"),
        ({"memory_plan": Path("plan.json")}, "--memory-plan: remove one of them: a plan is recorded without another"),
        ({"step_batch_size_schedule": "0:2"}, "--step-batch-size-schedule: remove it"),
        ({"num_experts": 4, "add_bias_linear": False}, "--num-experts: remove it"),
    ],
)
def test_steps_that_cannot_be_recorded_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"--record-memory-plan does not work with {message}"):
        refuse_conflicts(parsed(*POLICY, **settings), {"memory_record": "--record-memory-plan"}, refusals())
