"""Updates that overlap with training equal torch's Adam with late gradients, for any timing of the thread.

The reference steps torch's Adam with the mean gradients of some steps. Its parameters appear one update later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bytescale_ext.config.memory.states import NvmeConfig, StateConfig
from bytescale_ext.plan.states.late import late_bytes
from bytescale_ext.states.adam import PagedParameter
from bytescale_ext.states.lock_free import LockFreeAdam
from bytescale_ext.states.page_file import PagesDamaged
from tests.states.test_adam import PAGE_BYTES, Resident, assert_equal, in_order, load

STEPS = 8
BLOCK = 4096
MEMORY = StateConfig(PAGE_BYTES, math.inf)
Submit = Callable[[Callable[[], None]], "Future[None]"]


class Late(Future[None]):
    """Future that runs its function as late as possible: when it is awaited."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self.function = function

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            self.function()
            self.set_result(None)
        super().result(timeout)


def at_once(function: Callable[[], None]) -> Future[None]:
    """Run a function as early as possible: before training continues."""
    done: Future[None] = Future()
    function()
    done.set_result(None)
    return done


WHEN: dict[str, Submit] = {"late": Late, "at once": at_once, "thread": ThreadPoolExecutor(1).submit}


class Delayed(Resident):
    """Run the reference.

    An update has the mean gradients of some steps, and becomes visible when the next one starts.
    """

    def __init__(self, dtype: torch.dtype, update_steps: int) -> None:
        super().__init__(dtype)
        if dtype is torch.float32:  # visible and updated parameters differ here as well
            self.main = [one.clone() for one in self.model]
            self.optimizer = type(self.optimizer)(self._groups(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
        self.update_steps = update_steps
        self.given: list[list[torch.Tensor]] = []

    def _groups(self) -> list[dict[str, object]]:
        places = {id(one): number for number, one in enumerate(self.model)}
        return [
            {**group, "params": [self.main[places[id(one)]] for one in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def step(self, number: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
        torch.manual_seed(100 + number)
        self.given.append([torch.randn(one.shape) for one in self.main])
        if len(self.given) == self.update_steps:
            self.show()
            self.update()

    def show(self) -> None:
        for target, source in zip(self.model, self.main, strict=True):
            target.copy_(source)

    def update(self) -> None:
        for place, parameter in enumerate(self.main):
            total = self.given[0][place].clone()
            for gradients in self.given[1:]:
                total += gradients[place]
            parameter.grad = total / len(self.given)
        self.optimizer.step()
        self.given.clear()

    def flush(self) -> None:
        if self.given:
            self.update()
        self.show()


class LockFree(Resident):
    """Run the same steps on pages."""

    def __init__(self, dtype: torch.dtype, config: StateConfig, submit: Submit) -> None:
        super().__init__(dtype)
        targets = [one.view(-1) for one in in_order(self.model)]
        parameters = [PagedParameter(*pair) for pair in zip(in_order(self.main), targets, strict=True)]
        self.adam = LockFreeAdam(self.optimizer, parameters, config, on_cuda=False)
        self.adam.submit = submit

    def step(self, number: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
        self.adam.begin_step()
        torch.manual_seed(100 + number)
        for parameter in self.main:
            parameter.grad = torch.randn(parameter.shape)
        self.optimizer.step()
        assert all(parameter.grad is None for parameter in self.main)


def assert_models_equal(found: Resident, expected: Resident) -> None:
    assert all(torch.equal(*pair) for pair in zip(found.model, expected.model, strict=True))


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("update_steps", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_those_of_torch_some_steps_later(dtype: torch.dtype, update_steps: int, when: str) -> None:
    late = LockFree(dtype, replace(MEMORY, update_steps=update_steps), WHEN[when])
    delayed, exact = Delayed(dtype, update_steps), Resident(dtype)
    first = [one.clone() for one in late.model]
    missing = []
    for number in range(STEPS):
        missing.append(late.adam.missing)
        late.step(number)
        delayed.step(number)
        exact.step(number)
        assert_models_equal(late, delayed)
        if number < 2 * update_steps - 1:
            assert all(torch.equal(*pair) for pair in zip(late.model, first, strict=True))
    assert missing == ([0] + [1] * 7 if update_steps == 1 else [0, 1, 2, 3, 4, 5, 3, 4])
    late.adam.flush()
    delayed.flush()
    assert late.adam.missing == 0
    assert_models_equal(late, delayed)
    if dtype is torch.bfloat16:
        late.adam.lend(late.optimizer, changed=False)
        assert_equal(late, delayed)
    if update_steps == 1:  # gradients do not depend on parameters here, so only the time differs
        assert_models_equal(late, exact)


@pytest.mark.parametrize("when", WHEN)
def test_pages_on_a_disk(when: str, tmp_path: Path) -> None:
    num_bytes = late_bytes(10, 10, BLOCK, 2) + 28 * BLOCK
    config = StateConfig(BLOCK, num_bytes, NvmeConfig(tmp_path, math.inf, 0), update_steps=2)
    runs = [LockFreeLarge(one, WHEN[when]) for one in (config, StateConfig(BLOCK, math.inf, update_steps=2))]
    assert runs[0].adam.on_disk
    assert runs[1].adam.tiers is None
    for number in range(STEPS):
        for run in runs:
            run.step(number)
        assert_models_equal(*runs)
        if number == 4:
            for run in runs:
                run.adam.flush()
                run.adam.lend(run.optimizer, changed=False)
            assert_equal(*runs)


class LockFreeLarge(LockFree):
    """Parameters have several pages on a disk."""

    def __init__(self, config: StateConfig, submit: Submit) -> None:
        torch.manual_seed(2)
        self.model = [torch.randn(9000, dtype=torch.bfloat16), torch.randn(30, 40, dtype=torch.bfloat16)]
        self.main = [one.float() for one in self.model]
        self.optimizer = torch.optim.AdamW(self.main, lr=1e-2)
        parameters = [PagedParameter(main, one.view(-1)) for main, one in zip(self.main, self.model, strict=True)]
        self.adam = LockFreeAdam(self.optimizer, parameters, config, on_cuda=False)
        self.adam.submit = submit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_goes_on_exact_and_back(dtype: torch.dtype) -> None:
    late = LockFree(dtype, replace(MEMORY, update_steps=1), Late)
    whole = LockFree(dtype, replace(MEMORY, update_steps=1), Late)
    for number in range(3):
        late.step(number)
        whole.step(number)
    late.adam.flush()
    whole.adam.flush()
    exact = Resident(dtype)
    load(exact, late)
    assert_equal(exact, late)
    again = LockFree(dtype, replace(MEMORY, update_steps=1), at_once)
    again.step(7)  # its content is replaced
    again.adam.flush()
    load(again, exact)
    for number in range(3, STEPS):
        again.step(number)
        whole.step(number)
        assert_models_equal(again, whole)


def test_states_are_not_saved_before_all_updates() -> None:
    late = LockFree(torch.bfloat16, replace(MEMORY, update_steps=1), Late)
    late.step(0)
    with pytest.raises(AssertionError, match="flush first"):
        late.optimizer.state_dict()
    late.adam.flush()
    assert late.optimizer.state_dict()["state"][0]["step"] == 1
    late.adam.flush()  # does nothing
    assert late.optimizer.state_dict()["state"][0]["step"] == 1


def test_a_failed_update_ends_the_next_step() -> None:
    def fail(_: Callable[[], None]) -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(PagesDamaged("page 3 is not what was written"))
        return failed

    late = LockFree(torch.float32, replace(MEMORY, update_steps=1), fail)
    late.step(0)
    with pytest.raises(PagesDamaged, match="page 3"):
        late.step(1)
