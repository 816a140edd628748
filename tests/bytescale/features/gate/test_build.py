"""Temperatures, numbers of tokens and counts of experts around Megatron's forward steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.plan.experts.gate import DenseToSparse
from megatron.bytescale.core.transformer.moe.gate import Gate
from megatron.bytescale.core.transformer.moe.gate_noise import numbers_of_samples
from megatron.bytescale.features.gate import build as module
from tests.bytescale.core.transformer.moe.test_gate_noise import Shard, packed
from tests.bytescale.runtimes import runtime_of
from tests.config.runs import SHAPE, run_of

PLAN = DenseToSparse(2.0, 0.5, "linear", 4, 1e-3, 4, noise_seed=1)
STEP = {"curr_iteration": 0}


class Model(torch.nn.Module):
    vp_stage = None


@pytest.fixture(autouse=True)
def _megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    STEP["curr_iteration"] = 0
    sizes = {"seq_length": 8, "context_parallel_size": 1, "data_parallel_size": 2, "micro_batch_size": 3}
    monkeypatch.setattr("megatron.training.get_args", lambda: SimpleNamespace(**sizes, **STEP))
    monkeypatch.setattr(module.parallel_state, "get_data_parallel_rank", lambda: 1)
    monkeypatch.setattr(module.parallel_state, "get_context_parallel_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def forward(data_iterator: Iterator[Any] | None, model: Any) -> tuple[torch.Tensor, str]:
    if data_iterator is not None:
        next(data_iterator)
    return torch.ones(2, requires_grad=True) * 2, "loss function"


def test_samples_are_numbered_as_they_are_dealt_out() -> None:
    gate = Gate(PLAN)
    run = module.Numbering(gate, of_documents=False).wrap(forward)
    seen = []
    for step, first in ((0, 3), (0, 9), (1, 3)):  # two ranks of three samples in each micro-batch
        STEP["curr_iteration"] = step
        assert run(None, Model().train())[1] == "loss function"
        seen.append(gate.tokens)
        assert torch.equal(gate.tokens, numbers_of_samples(first, 3, range(8)))  # type: ignore[arg-type]
    run(None, Model().eval())
    assert gate.tokens is seen[-1], "an evaluation has no noise and no number"


def test_slices_of_a_sample_are_parts_of_it() -> None:
    gate = Gate(PLAN)
    run = module.Numbering(gate, False, (range(5), range(5, 8))).wrap(forward)
    for first, part in ((3, range(5)), (3, range(5, 8)), (9, range(5))):
        run(None, Model())
        assert torch.equal(gate.tokens, numbers_of_samples(first, 3, part))  # type: ignore[arg-type]


def test_each_backward_pass_has_the_numbers_of_its_forward_pass() -> None:
    gate = Gate(PLAN)
    run = module.Numbering(gate, of_documents=True).wrap(forward)
    units = iter([(index, packed(Shard(index, ((0, 4),), (0,))), None) for index in range(2)])
    outputs, numbers = [], []
    for _ in range(2):
        outputs.append(run(units, Model())[0])
        numbers.append(gate.tokens)
    assert numbers[0][0] == 0
    assert numbers[1][0] == 1 << 32
    outputs[0].sum().backward()
    assert gate.tokens is numbers[0]


def test_steps_have_their_temperatures() -> None:
    gate = Gate(PLAN)
    run = module._heated(gate, forward)
    for step, temperature in enumerate([2.0, 1.625, 1.25, 0.875, None, None]):
        STEP["curr_iteration"] = step
        run(None, Model())
        assert (gate.step, gate.temperature) == (step, temperature)


def test_mean_experts_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, whose tokens count equally; the log is written every second step, and the gate ends after four."""
    lines: list[str] = []
    monkeypatch.setattr(module, "print_rank_last", lines.append)
    monkeypatch.setattr(module, "write_scalars", lambda scalars, step: lines.append(f"{step} {scalars}"))
    other = torch.tensor([30.0, 10.0], dtype=torch.float64)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: sums.add_(other))
    run = run_of(shape=replace(SHAPE, num_experts=4, experts_per_token=2))
    runtime = runtime_of(run=run, log_interval=2)
    counts = module.ActiveExperts(Gate(PLAN), runtime)
    means = []
    for step in range(6):
        STEP["curr_iteration"] = step
        if step < PLAN.steps:
            counts.gate.note(torch.arange(4).expand(10, 4) <= step)
        counts()
        means.append(runtime.step.active_experts)
    assert means == [2.0, 2.5, 3.0, 3.5, 2.0, 2.0]
    assert lines[0] == "> bytescale: 2.250 experts of a token since the last line"
    assert lines[1:] == ["2 {'experts/active': 2.25}", lines[2], "4 {'experts/active': 3.25}"]
