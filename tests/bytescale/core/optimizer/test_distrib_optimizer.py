"""Saving and loading an optimizer. runs/test_resume.py and hdp/test_moe.py in tests/e2e resume runs."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.bytescale.core.optimizer.distrib_optimizer import (
    add_step,
    begin_state,
    wrap_load_state_dict,
)


@pytest.mark.parametrize(("state", "num_parts"), [([{}, {}], 2), ({0: {}, 1: {}}, 2), ({"optimizer": {}}, 1)])
def test_an_optimizer_is_loaded_in_as_many_parts_as_it_was_saved(state: Any, num_parts: int) -> None:
    loaded: list[Any] = []
    load = wrap_load_state_dict(lambda optimizer, state: loaded.append((optimizer, state)), None)
    chained = {number: SimpleNamespace(chained_optimizers=[None] * number) for number in (1, 2)}
    load(chained[num_parts], state)
    assert loaded == [(chained[num_parts], state)]
    with pytest.raises(ValueError, match=f"an optimizer of {num_parts} parts and this run has one of {3 - num_parts}"):
        load(chained[3 - num_parts], state)
    with pytest.raises(ValueError, match="an optimizer of 2 parts and this run has one of 1"):
        load(chained[1], {0: {}, 1: {}, "param_state": {}})  # a merged sharded optimizer
    assert len(loaded) == 1


def test_a_part_without_parameters_is_saved_with_the_step_of_another() -> None:
    other, empty = torch.optim.Adam([torch.ones(2, requires_grad=True)]), torch.optim.Adam([{"params": []}])
    begin_state(other)
    other.param_groups[0]["params"][0].grad = torch.ones(2)
    for _ in range(3):
        other.step()
    empty.register_state_dict_post_hook(partial(add_step, other))
    saved = empty.state_dict()
    assert [state["step"].item() for state in saved["state"].values()] == [3.0]  # Megatron reads the step in this way
    assert len(saved["param_groups"]) == 1
    assert not empty.state
    assert len(other.state) == 1
