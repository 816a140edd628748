"""Pages of an optimizer with update counts per group, as a replacement of TransformerEngine's or Apex's Adam."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.optim.adam import adam

from bytescale_ext.states.adam import PagedAdam, PagedParameter
from bytescale_ext.states.group_counts import GroupCountingAdam, count_update, store_count, update_counts
from tests.states.test_adam import AMPLE, Resident, in_order


class FusedAdam(torch.optim.Optimizer):
    """Optimizer with counts per group and the signature of Apex's Adam, and the arithmetic of torch's Adam."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state.update(exp_avg=torch.zeros_like(one), exp_avg_sq=torch.zeros_like(one))
                count = torch.tensor(group["step"] - 1.0)
                adam(
                    [one], [one.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [count],
                    amsgrad=False, maximize=False, foreach=False, decoupled_weight_decay=self.adam_w_mode,
                    beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                    weight_decay=group["weight_decay"], eps=group["eps"],
                )  # fmt: skip


class Fused(Resident):
    """Run the reference: the fused Adam on float32 copies."""

    def __init__(self, is_decoupled: bool = True) -> None:
        super().__init__(torch.bfloat16, is_decoupled)
        groups: list[dict[str, Any]] = [
            {"params": group["params"], "weight_decay": group["weight_decay"], "wd_mult": 1.0}
            for group in self.optimizer.param_groups
        ]
        fused: Any = FusedAdam(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, adam_w_mode=is_decoupled)
        self.optimizer = fused


class PagedFused(Fused):
    """Run the same steps on pages."""

    def __init__(self, is_decoupled: bool = True) -> None:
        super().__init__(is_decoupled)
        self.optimizer = GroupCountingAdam.taking_over(self.optimizer, is_decoupled)
        targets = [one.view(-1) for one in in_order(self.model)]
        parameters = [PagedParameter(*pair) for pair in zip(in_order(self.main), targets, strict=True)]
        self.adam = PagedAdam(self.optimizer, parameters, AMPLE, on_cuda=False)

    def step(self, number: int) -> None:
        self.adam.begin_step()
        super().step(number)


def assert_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_steps_and_states_are_those_of_the_fused_adam(is_decoupled: bool) -> None:
    paged, fused = PagedFused(is_decoupled), Fused(is_decoupled)
    for number in range(4):
        paged.step(number)
        fused.step(number)
        assert_equal(paged.model, fused.model)
    states = [run.optimizer.state_dict() for run in (paged, fused)]
    assert [group["step"] for group in states[0]["param_groups"]] == [4, 4]
    for found, expected in zip(states[0]["param_groups"], states[1]["param_groups"], strict=True):
        assert {name: found[name] for name in expected} == expected
    for key, expected in states[1]["state"].items():
        assert states[0]["state"][key].keys() == expected.keys() == {"exp_avg", "exp_avg_sq"}
        assert_equal([*states[0]["state"][key].values()], [*expected.values()])


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_states_go_from_one_to_the_other_and_back(is_decoupled: bool) -> None:
    whole = Fused(is_decoupled)
    runs: list[Fused] = [Fused(is_decoupled), PagedFused(is_decoupled), Fused(is_decoupled), PagedFused(is_decoupled)]
    for number, run in enumerate(runs):
        if number:
            for parts in zip((run.model, run.main), (runs[number - 1].model, runs[number - 1].main), strict=True):
                for found, expected in zip(*parts, strict=True):
                    found.data.copy_(expected)
            run.optimizer.load_state_dict(copy.deepcopy(runs[number - 1].optimizer.state_dict()))
        run.step(number)
        whole.step(number)
        assert_equal(run.model, whole.model)


def test_states_of_torch_are_loaded_with_their_count() -> None:
    torchs = Resident(torch.bfloat16)
    for number in range(3):
        torchs.step(number)
    paged = PagedFused()
    paged.optimizer.load_state_dict(copy.deepcopy(torchs.optimizer.state_dict()))
    assert [group["step"] for group in paged.optimizer.param_groups] == [3, 3]
    assert [float(one) for one in update_counts(paged.optimizer)] == [3.0] * 6


def test_counts_of_both_kinds() -> None:
    one, other = torch.ones(3), torch.ones(2)
    groups: list[dict[str, Any]] = [{"params": [one]}, {"params": []}]
    plain, counting = torch.optim.Adam([other]), GroupCountingAdam.taking_over(FusedAdam(groups), True)
    for optimizer, parameter in ((plain, other), (counting, one)):
        store_count(optimizer, optimizer.param_groups[0], parameter)
        for expected in (0.0, 1.0):
            assert [float(count) for count in update_counts(optimizer)] == [expected]
            count_update(optimizer)
    assert "step" not in counting.state[one]
    assert "step" not in counting.param_groups[1]
    assert all(group["decoupled_weight_decay"] for group in counting.param_groups)
