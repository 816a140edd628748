"""Loading an optimizer; that a run goes on after it is in tests/e2e/test_resume.py and tests/e2e/test_moe.py."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.bytescale.core.optimizer.distrib_optimizer import load_as_many_parts


@pytest.mark.parametrize(("state", "num_parts"), [([{}, {}], 2), ({0: {}, 1: {}}, 2), ({"optimizer": {}}, 1)])
def test_an_optimizer_is_loaded_in_as_many_parts_as_it_was_saved(state: Any, num_parts: int) -> None:
    loaded: list[Any] = []
    load_as_many_parts(loaded.append, num_parts, state)
    assert loaded == [state]
    with pytest.raises(ValueError, match=f"an optimizer of {num_parts} parts and this run has one of {3 - num_parts}"):
        load_as_many_parts(loaded.append, 3 - num_parts, state)
    with pytest.raises(ValueError, match="an optimizer of 2 parts and this run has one of 1"):
        load_as_many_parts(loaded.append, 1, {0: {}, 1: {}, "param_state": {}})  # a sharded one, merged
