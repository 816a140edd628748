from __future__ import annotations

import pytest

from bytescale_ext.plan.activation.plan import ActivationPlan


@pytest.mark.parametrize(
    ("shares", "message"),
    [((1.2, 0.0), "swap fraction is 1.2"), ((-0.1, 0.0), "from 0 to 1"), ((0.7, 0.5), "sum to more than 1")],
)
def test_bad_shares(shares: tuple[float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationPlan("shares", *shares)
