"""Adam on pages is bitwise equal to torch's Adam, and its states are where torch would have them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.states.adam import PagedAdam, PagedParameter

SHAPES = ((5, 3), (1,), (40, 7), (2, 2), (9,), (33,))
GROUPS = ((0, 2, 3, 5), (1, 4))  # the second group has no weight decay
STEPS = 6
PAGE_BYTES = 64
AMPLE = StateConfig(PAGE_BYTES, math.inf)


def models(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return parameters of a model, equal in each call."""
    torch.manual_seed(1)
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def optimizer_of(parameters: Sequence[torch.Tensor], is_decoupled: bool) -> torch.optim.Adam:
    groups: list[dict[str, Any]] = [
        {"params": [parameters[number] for number in group], "weight_decay": decay}
        for group, decay in zip(GROUPS, (0.1, 0.0), strict=True)
    ]
    return (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)


def in_order(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors in the order of the optimizer."""
    return [tensors[number] for group in GROUPS for number in group]


class Resident:
    """Torch's Adam on float32 copies, as in Megatron; float32 parameters are their own copies."""

    def __init__(self, dtype: torch.dtype, is_decoupled: bool = True) -> None:
        self.model = models(dtype)
        self.main = [one if dtype is torch.float32 else one.detach().clone().float() for one in self.model]
        self.optimizer = optimizer_of(self.main, is_decoupled)

    def step(self, number: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)  # like a schedule
        torch.manual_seed(100 + number)
        for parameter in self.main:
            parameter.grad = torch.randn(parameter.shape)
        self.optimizer.step()
        for target, source in zip(self.model, self.main, strict=True):
            target.copy_(source)


class Paged(Resident):
    """Run the same steps on pages."""

    def __init__(self, dtype: torch.dtype, is_decoupled: bool = True, config: StateConfig = AMPLE) -> None:
        super().__init__(dtype, is_decoupled)
        targets = [one.view(-1) for one in in_order(self.model)]
        parameters = [PagedParameter(*pair) for pair in zip(in_order(self.main), targets, strict=True)]
        self.adam = PagedAdam(self.optimizer, parameters, config, on_cuda=False)

    def step(self, number: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
        self.adam.begin_step()
        torch.manual_seed(100 + number)
        for parameter in self.main:
            parameter.grad = torch.randn(parameter.shape)
        self.optimizer.step()


def assert_equal(paged: Resident, resident: Resident) -> None:
    """Check that parameters and states are bitwise equal."""
    for one, other in zip((paged.model, paged.main), (resident.model, resident.main), strict=True):
        for found, expected in zip(one, other, strict=True):
            assert torch.equal(found, expected)
    for found, expected in zip(paged.main, resident.main, strict=True):
        states = paged.optimizer.state[found], resident.optimizer.state[expected]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("is_decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_equal_those_of_torch(dtype: torch.dtype, is_decoupled: bool) -> None:
    paged, resident = Paged(dtype, is_decoupled), Resident(dtype, is_decoupled)
    before = [one.clone() for one in paged.model]
    for number in range(STEPS):
        paged.step(number)
        resident.step(number)
        assert_equal(paged, resident)
    assert not any(torch.equal(one, other) for one, other in zip(before, paged.model, strict=True))
    assert len(paged.adam.table.pages) > len(SHAPES)


def test_the_fused_kernel_is_as_close_as_float32() -> None:
    paged, resident = Paged(torch.float32), Resident(torch.float32)
    paged.adam.is_fused = True
    for number in range(STEPS):
        paged.step(number)
        resident.step(number)
    for found, expected in zip(paged.main, resident.main, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_go_from_resident_to_paged_and_back(dtype: torch.dtype) -> None:
    whole = Resident(dtype)
    runs: list[Resident] = [Resident(dtype), Paged(dtype), Paged(dtype), Resident(dtype)]
    for number, run in enumerate(runs):
        if number:
            load(run, runs[number - 1])
        run.step(number)
        whole.step(number)
        assert_equal(run, whole)


def load(run: Resident, saved: Resident) -> None:
    """Load the state of another run: parameters, and states as in a file."""
    for parts in zip((run.model, run.main), (saved.model, saved.main), strict=True):
        for found, expected in zip(*parts, strict=True):
            found.data.copy_(expected)
    run.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))


@pytest.mark.parametrize("stage", [1, 2])
def test_the_device_holds_no_copies_while_gradients_are_attached(stage: int) -> None:
    """From stage 2 on, gradients are in host memory."""
    paged = Paged(torch.bfloat16, config=replace(AMPLE, stage=stage))
    values = [one.clone() for one in paged.main]
    paged.adam.begin_step()
    assert all(one.untyped_storage().nbytes() == 4 for one in paged.main)
    assert [one.shape for one in paged.main] == [torch.Size(shape) for shape in SHAPES]
    for parameter in paged.main:
        parameter.grad = torch.zeros(parameter.shape)
    paged.optimizer.param_groups[0]["weight_decay"] = 0.0
    paged.optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(paged.main, values, strict=True))
    assert all(parameter.grad is None for parameter in paged.main)
