from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.placement import plan_memory
from bytescale_ext.plan.memory.plan import Request, TwoLevelPlan
from bytescale_ext.plan.memory.step_file import ModelTraits, StepMemory, StepRecord

SHAPE = ModelShape(4, 64, 2, 2, 32, 128, True, 256)
SHARES = ActivationPlan("memo", 0.4, 0.6, 1.0, False, 2)
TRAITS = ModelTraits("LayerNorm", linear_biases=True, fused_activation=True)
RECORD = StepRecord(SHAPE, 128, "bfloat16", 64, SHARES, TRAITS, "cuda")
LEVEL = plan_memory([Request("a", 40, 0, 3), Request("b", 8, 1, 2)])
MEMORY = StepMemory(RECORD, 1024, TwoLevelPlan({"forward": LEVEL, "backward": LEVEL}, LEVEL))


def test_json_comes_back() -> None:
    assert StepMemory.from_json(json.loads(json.dumps(MEMORY.to_json()))) == MEMORY


def test_the_same_step_and_a_shorter_one_are_served() -> None:
    MEMORY.check_serves(RECORD, "plan.json")
    near = replace(RECORD.activations, policy="shares", swap=0.405, recompute=0.595)
    MEMORY.check_serves(replace(RECORD, num_tokens=100, activations=near), "plan.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": replace(SHAPE, hidden=32, vocab=512)}, "hidden is 64 there and 32 here; vocab is 256 there and 512"),
        ({"num_tokens": 129}, "it is for 128 tokens and micro-batches have up to 129"),
        ({"dtype": "float32"}, "dtype is bfloat16 there and float32 here"),
        ({"loss_tokens": None}, "--chunked-cross-entropy is 64 there and None here"),
        ({"activations": ActivationPlan("memo", 0.5, 0.5, 1.0, False, 2)}, "the swap of activations is 0.4 there and"),
        ({"device": "cpu"}, "device is cuda there and cpu here"),
        ({"activations": ActivationPlan("none")}, "the resident_layers of activations is 2 there and 0 here"),
    ],
)
def test_another_step_is_refused_with_all_differences(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="for another model or step") as caught:
        MEMORY.check_serves(replace(RECORD, **changes), "plan.json")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [field.name for field in fields(ModelTraits)])
def test_every_trait_of_the_model_must_agree(name: str) -> None:
    value = getattr(TRAITS, name)
    other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else f"another {value}"
    step = replace(RECORD, traits=replace(TRAITS, **{name: other}))
    with pytest.raises(ValueError, match=rf"step: {name} is {value} there and {other} here; record one"):
        MEMORY.check_serves(step, "plan.json")


def test_what_is_no_plan_is_refused() -> None:
    for value in ([], {}, {**MEMORY.to_json(), "record": {"shape": {"layers": 3}}}):
        with pytest.raises(ValueError, match="not a memory plan"):
            StepMemory.from_json(value)  # type: ignore[arg-type]
    broken = MEMORY.to_json()
    broken["model"] = {**broken["model"], "bound": 1}
    with pytest.raises(ValueError, match="an invalid memory plan: >> the liveness bound"):
        StepMemory.from_json(broken)
