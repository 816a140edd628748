from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.plan.experts.placement import PARTS, homes_of
from bytescale_ext.plan.experts.quotas import as_parts, level_out, poured
from tests.sample import examples


@given(st.floats(0, 1e6), st.lists(st.floats(0, 1e6), min_size=1, max_size=6))
@settings(max_examples=examples(60), deadline=None)
def test_pouring_raises_the_lowest(tokens: float, levels: list[float]) -> None:
    taken = poured(tokens, levels)
    assert min(taken) >= 0
    assert sum(taken) == pytest.approx(tokens, rel=1e-9, abs=1e-6)
    reached = [level + more for level, more in zip(levels, taken, strict=True)]
    wet = [total for total, more in zip(reached, taken, strict=True) if more > 1e-6]
    if wet:
        assert max(wet) - min(wet) < 1e-6 * max(1.0, max(wet))
        assert min(reached) >= min(wet) - 1e-6 * max(1.0, max(wet))


def test_ranks_are_levelled_through_others() -> None:
    """Rank 0 shares an expert only with rank 1, and rank 1 with rank 2, so tokens move in two steps."""
    held = homes_of(3, 3)
    held[1, 0] = held[2, 1] = True
    tokens = np.diag([70.0, 50.0, 0.0])
    level_out(tokens, held, sweeps=60)
    assert tokens.sum(1) == pytest.approx([40, 40, 40], abs=0.01)
    assert tokens.sum(0).tolist() == pytest.approx([70, 50, 0])
    assert not tokens[~held].any()


def test_parts_are_exact() -> None:
    homes = homes_of(4, 2)
    tokens = np.array([[1.0, 0.0, 2.0, 0.0], [2.0, 0.0, 0.0, 5.0]])
    parts = as_parts(tokens, homes)
    assert parts.sum(0).tolist() == [PARTS] * 4
    assert parts[:, 0].tolist() == [341, 683]
    assert parts[:, 1].tolist() == [PARTS, 0]  # an expert without tokens stays at home
    assert parts[:, 2].tolist() == [PARTS, 0]
    assert parts[:, 3].tolist() == [0, PARTS]
