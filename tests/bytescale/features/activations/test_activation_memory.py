"""``--memory-plan``: refusals before training, and the effect of a plan in a process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.placement import plan_memory
from bytescale_ext.plan.memory.plan import Request, TwoLevelPlan
from bytescale_ext.plan.memory.step_file import ModelTraits, StepMemory, StepRecord
from megatron.bytescale.features.activations.activation_memory import PlannedMemory
from tests.activation.test_run import PLANS, inputs_of, make_layers, make_store, results

SHAPE = ModelShape(8, 1024, 8, 8, 128, 4096, True, 32000)
SHARES = ActivationPlan("memo", 0.25, 0.75, 1.0, False, 2)
TRAITS = ModelTraits(linear_biases=True, qkv_biases=True, fused_activation=True)
RECORD = StepRecord(SHAPE, 8192, "bfloat16", None, SHARES, TRAITS, "cpu")
LEVEL = plan_memory([Request("a", 4_000_000, 0, 3), Request("b", 1_000_000, 1, 2)])
MEMORY = StepMemory(RECORD, 1 << 16, TwoLevelPlan({"forward": LEVEL, "backward": LEVEL}, LEVEL))


def test_the_first_step_is_held_against_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(PLANS["memo-0.4"])
    layers = make_layers(store)
    model = torch.nn.ModuleList(layers)
    planned = PlannedMemory(MEMORY, store, on_cuda=False, prints=True)
    for _ in range(2):
        planned.begin(model)
        results(layers, inputs_of(40))
        planned.end()
    assert store.buffers is not None
    assert store.buffers.num_bytes == 1 << 16
    assert store.buffers.num_taken > 0
    (line,) = capsys.readouterr().out.splitlines()  # the first step only
    assert line.startswith("> bytescale: memory plan: 5.000 MB planned, 0.")
    assert line.endswith("on CPU no memory is reserved, but rounding buffers are used")


@pytest.mark.parametrize(("used", "is_more"), [(5_000_000, False), (5_350_000, False), (5_400_000, True)])
def test_buffers_may_come_on_top_of_the_plan(used: int, is_more: bool) -> None:
    """5 % of 5 MB, and two buffers of 64 KiB."""
    planned = PlannedMemory(MEMORY, make_store(PLANS["memo-0.4"]), on_cuda=True, prints=True)
    text = planned.report(used)
    assert ("this exceeds the plan" in text) == is_more
    assert f"{used / 1e6:.3f} MB at most in the first step" in text
    assert "on CPU" not in text


def test_nothing_swapped_needs_no_buffers(capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(PLANS["keep-attention-only"])
    layers = make_layers(store)
    planned = PlannedMemory(replace(MEMORY, buffer_bytes=0), store, on_cuda=False, prints=False)
    planned.begin(torch.nn.ModuleList(layers))
    results(layers, inputs_of(40))
    planned.end()
    assert store.buffers is None
    assert capsys.readouterr().out == ""
