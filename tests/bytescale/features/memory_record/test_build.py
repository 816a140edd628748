"""The recorder of a step: the first one only, on one process; ranks of pipelines are in ``tests/e2e/activation``."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bytescale_ext.plan.memory.placement import liveness_bound
from bytescale_ext.plan.memory.plan_file import PlanFile, RecordTo
from megatron.bytescale.features.activations.activation_memory import FirstStep
from megatron.bytescale.features.memory_record.build import StepRecorder
from tests.activation.test_run import PLANS, inputs_of, make_layers, make_store, results
from tests.bytescale.features.activations.test_activation_memory import RECORD
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def record(rank: int, world: int, folder: str) -> str:
    """Record two steps; return what this rank printed."""
    with redirect_stdout(io.StringIO()) as printed:
        _record(rank, folder)
    return printed.getvalue()


def _record(rank: int, folder: str) -> None:
    store = make_store(PLANS["memo-0.4"])
    layers = torch.nn.ModuleList(make_layers(store))
    for number, layer in enumerate(layers):
        layer.layer_number = number + 1
    model = torch.nn.Module()
    model.decoder = SimpleNamespace(layers=layers, input_tensor=torch.ones(300))
    target = RecordTo(Path(folder) / "plan.json", RECORD)
    recorder = StepRecorder(target, (rank, 0), FirstStep(store), is_planned=rank == 0, text=" of stage 0")
    assert recorder.watch([model]) == [model]
    for _ in range(2):
        recorder.begin(model)
        recorder.begin(model)  # of a second micro-batch
        results(layers, inputs_of(40))
        recorder.end()
    assert recorder.step.trace is None
    dist_plans = PlanFile.from_json(json.loads(target.path.read_text())) if rank == 0 else None
    if dist_plans is not None:
        (plan,) = dist_plans.plans
        assert plan.record == RECORD
        assert plan.buffer_bytes > 0
        model_plan = plan.plan.model
        assert model_plan.peak >= model_plan.bound == liveness_bound(model_plan.requests)
        assert any("received" in request.name for request in model_plan.requests)


def test_the_first_step_is_planned_and_written_by_the_first_rank(tmp_path: Path) -> None:
    text = "".join(run_ranks(record, 2, str(tmp_path)))
    assert text.count("> bytescale: memory plan of stage 0: ") == 1
    assert text.count(f"> bytescale: memory plans written to {tmp_path / 'plan.json'}") == 1
