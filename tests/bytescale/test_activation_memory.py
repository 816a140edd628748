"""``--memory-plan``: what is refused before training, and what a plan does in a process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale_ext.plan.activation import ActivationPlan
from bytescale_ext.plan.cost import ModelShape
from bytescale_ext.plan.memory import Request, TwoLevelPlan, plan_memory
from bytescale_ext.plan.memory_step import StepMemory, StepRecord
from megatron.bytescale.training import activations
from megatron.bytescale.training.activation_memory import PlannedMemory
from tests.activation.test_run import PLANS, inputs_of, make_layers, make_store, results
from tests.bytescale.test_activation_flags import MEMO, parsed

SHAPE = ModelShape(8, 1024, 8, 8, 128, 4096, True, 32000)
RECORD = StepRecord(SHAPE, 8192, "bfloat16", None, ActivationPlan("memo", 0.25, 0.75, 1.0, False, 2))
LEVEL = plan_memory([Request("a", 4_000_000, 0, 3), Request("b", 1_000_000, 1, 2)])
MEMORY = StepMemory(RECORD, 1 << 16, TwoLevelPlan({"forward": LEVEL, "backward": LEVEL}, LEVEL))
POLICY = (*MEMO, "--swap-fraction", "0.25")


def write(path: Path, memory: StepMemory = MEMORY) -> str:
    path.write_text(json.dumps(memory.to_json()))
    return str(path)


def test_a_plan_of_this_model_is_taken(tmp_path: Path) -> None:
    words = (*POLICY, "--memory-plan", write(tmp_path / "plan.json"))
    config = activations.activation_config(parsed(*words), None)
    assert config is not None and config.memory == MEMORY
    plain = write(tmp_path / "plain.json", replace(MEMORY, record=replace(RECORD, activations=ActivationPlan("none"))))
    without_policy = activations.activation_config(parsed("--memory-plan", plain), None)
    assert without_policy is not None and without_policy.memory is not None
    assert without_policy.plan(without_policy.largest).is_off


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 512}, "of another model or step: hidden is 1024 there and 512 here"),
        ({"params_dtype": torch.float32}, "dtype is bfloat16 there and float32 here"),
        ({"seq_length": 16384}, "it is for 8192 tokens and micro-batches have up to 16384"),
        ({"chunked_cross_entropy": 64}, "--chunked-cross-entropy is None there and 64 here"),
        ({"swap_fraction": 0.5}, "the swap of activations is 0.25 there and 0.5 here"),
        ({"tensor_model_parallel_size": 2}, "--memory-plan does not work with --tensor-model-parallel-size"),
        ({"pipeline_model_parallel_size": 2}, "--memory-plan does not work with --pipeline-model-parallel-size"),
    ],
)
def test_a_plan_of_another_model_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        activations.activation_config(parsed(*POLICY, "--memory-plan", write(tmp_path / "p.json"), **settings), None)


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    for name, message in (
        ("missing.json", "cannot be read"),
        ("text.json", "text.json: "),
        ("other.json", "not a mem"),
    ):
        with pytest.raises(ValueError, match=message):
            activations.activation_config(parsed(*POLICY, "--memory-plan", str(tmp_path / name)), None)


def test_the_first_step_is_held_against_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(PLANS["memo-0.4"])
    layers = make_layers(store)
    model = torch.nn.ModuleList(layers)
    planned = PlannedMemory(MEMORY, store, on_cuda=False, says=True)
    for _ in range(2):
        planned.begin(model)
        results(layers, inputs_of(40))
        planned.end()
    assert store.buffers is not None and store.buffers.num_bytes == 1 << 16 and store.buffers.num_taken > 0
    (line,) = capsys.readouterr().out.splitlines()  # the first step only
    assert line.startswith("> bytescale: memory plan: 5.000 MB planned, 0.")
    assert line.endswith("on CPU nothing is reserved, rounding buffers are used")


@pytest.mark.parametrize(("used", "is_more"), [(5_000_000, False), (5_350_000, False), (5_400_000, True)])
def test_buffers_may_come_on_top_of_the_plan(used: int, is_more: bool) -> None:
    """5 % of 5 MB, and two buffers of 64 KiB."""
    planned = PlannedMemory(MEMORY, make_store(PLANS["memo-0.4"]), on_cuda=True, says=True)
    text = planned.report(used)
    assert ("this is more" in text) == is_more
    assert f"{used / 1e6:.3f} MB at most in the first step" in text
    assert "on CPU" not in text


def test_nothing_swapped_needs_no_buffers(capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(PLANS["keep-attention-only"])
    layers = make_layers(store)
    planned = PlannedMemory(replace(MEMORY, buffer_bytes=0), store, on_cuda=False, says=False)
    planned.begin(torch.nn.ModuleList(layers))
    results(layers, inputs_of(40))
    planned.end()
    assert store.buffers is None and capsys.readouterr().out == ""
