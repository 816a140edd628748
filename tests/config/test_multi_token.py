"""Numbers of multi-token prediction that are refused."""

from __future__ import annotations

import pytest

from bytescale_ext.config.multi_token import MultiTokenConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-1, 0.1), "--mtp-num-layers -1 must be at least 1"),
        ((2, -0.1), "--mtp-loss-scaling-factor -0.2 must be 0 or more"),
        ((1, float("nan")), "--mtp-loss-scaling-factor nan must be 0 or more"),
    ],
)
def test_bad_numbers(values: tuple[int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiTokenConfig(*values)


def test_a_weight_of_zero_only_logs_the_losses() -> None:
    assert MultiTokenConfig(2, 0.0).loss_scale == 0
