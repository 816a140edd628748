"""Saving and loading an optimizer; that a run goes on after it: tests/e2e/test_resume.py and tests/e2e/test_moe.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.bytescale.core.optimizer.distrib_optimizer import begin_state, load_as_many_parts, state_dict_with_step


@pytest.mark.parametrize(("state", "num_parts"), [([{}, {}], 2), ({0: {}, 1: {}}, 2), ({"optimizer": {}}, 1)])
def test_an_optimizer_is_loaded_in_as_many_parts_as_it_was_saved(state: Any, num_parts: int) -> None:
    loaded: list[Any] = []
    load_as_many_parts(loaded.append, num_parts, state)
    assert loaded == [state]
    with pytest.raises(ValueError, match=f"an optimizer of {num_parts} parts and this run has one of {3 - num_parts}"):
        load_as_many_parts(loaded.append, 3 - num_parts, state)
    with pytest.raises(ValueError, match="an optimizer of 2 parts and this run has one of 1"):
        load_as_many_parts(loaded.append, 1, {0: {}, 1: {}, "param_state": {}})  # a sharded one, merged


def test_a_part_without_parameters_has_the_step_of_the_others() -> None:
    other, empty = torch.optim.Adam([torch.ones(2, requires_grad=True)]), torch.optim.Adam([{"params": []}])
    begin_state(other)
    other.param_groups[0]["params"][0].grad = torch.ones(2)
    for _ in range(3):
        other.step()

    def steps() -> list[float]:
        return [state["step"].item() for state in empty.state_dict()["state"].values()]  # as Megatron looks for them

    assert state_dict_with_step(steps, empty, other) == [3.0]
    assert steps() == [] and len(other.state) == 1
    with pytest.raises(ZeroDivisionError):
        state_dict_with_step(lambda: 1 / 0, empty, other)
    assert steps() == []
