"""Loss curves: known constants are recovered, and intervals show uncertainty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale_ext.data.mix.curves import EXPONENTS, Curve, fit, propose

TOKENS = np.arange(1, 61, dtype=float) * 4096


def noisy(curve: Curve, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    return TOKENS, curve.loss(TOKENS) + noise * np.random.RandomState(seed).standard_normal(len(TOKENS))


@pytest.mark.parametrize("exponent", [EXPONENTS[3], EXPONENTS[9], EXPONENTS[20]])
@pytest.mark.parametrize("floor", [0.0, 1.5])
def test_a_curve_is_found_again(exponent: float, floor: float) -> None:
    curve = Curve(floor, 5 * 4096**exponent, exponent)
    found = fit(TOKENS, curve.loss(TOKENS))
    assert found.exponent == pytest.approx(exponent)
    assert found.floor == pytest.approx(floor, abs=1e-6)
    assert found.gain(1e5) == pytest.approx(curve.gain(1e5))


@pytest.mark.full
@pytest.mark.slow
def test_what_still_falls_gets_more() -> None:
    steep, flat = Curve(1.0, 200.0, 0.4), Curve(1.0, 20.0, 0.4)
    runs = {
        "new": [noisy(steep, 0.01, seed) for seed in range(3)],
        "known": [noisy(flat, 0.01, seed) for seed in (3, 4)],
    }
    found = propose(runs)
    assert found["new"].factor > 1.5 > 1 > found["known"].factor
    assert found["new"].is_clear
    assert found["known"].is_clear
    assert found["new"].low <= found["new"].factor <= found["new"].high
    expected = [curve.gain(TOKENS[-1]) for curve in (steep, flat)]
    assert found["new"].factor == pytest.approx(expected[0] / np.mean(expected), rel=0.1)
    assert np.mean([one.factor for one in found.values()]) == pytest.approx(1)


@pytest.mark.slow
def test_noise_is_not_taken_for_knowledge() -> None:
    """With equal sources, the intervals contain 1 in most draws of the noise."""
    curve = Curve(2.0, 30.0, 0.3)
    clear = 0
    for trial in range(5):
        runs = {name: [noisy(curve, 0.3, 10 * trial + i + 5 * j) for j in range(2)] for i, name in enumerate("ab")}
        clear += sum(one.is_clear for one in propose(runs, draws=40).values())
    assert clear <= 5  # 8 of 10, because an interval of 80 % excludes 2


def test_too_few_steps_and_losses_that_do_not_fall_are_errors() -> None:
    short = TOKENS[:7], TOKENS[:7]
    with pytest.raises(ValueError, match="a small run has 7 steps: give --proxy-steps 8 or more"):
        propose({"a": [short], "b": [short]})
    flat = TOKENS, np.full(len(TOKENS), 3.0)
    with pytest.raises(ValueError, match="no loss falls in the small runs"):
        propose({"a": [flat], "b": [flat]})


@given(st.integers(0, 1000))
def test_no_other_curve_of_the_grid_fits_better(seed: int) -> None:
    tokens, losses = noisy(Curve(1.0, 40.0, 0.35), 0.2, seed)
    found = fit(tokens, losses)
    error = ((found.loss(tokens) - losses) ** 2).sum()
    for exponent in EXPONENTS.tolist():
        columns = np.stack([np.ones_like(tokens), tokens**-exponent], axis=1)
        (floor, scale), *_ = np.linalg.lstsq(columns, losses)
        if floor >= 0 and scale >= 0:
            assert error <= ((columns @ (floor, scale) - losses) ** 2).sum() + 1e-9


def test_the_mean_of_several_runs_is_taken() -> None:
    steep, flat, other = Curve(1.0, 90.0, 0.4), Curve(1.0, 30.0, 0.4), Curve(1.0, 60.0, 0.4)
    runs = {"two": [(TOKENS, one.loss(TOKENS)) for one in (steep, flat)], "one": [(TOKENS, other.loss(TOKENS))]}
    found = propose(runs, draws=60)
    assert found["two"].factor == pytest.approx(1.0, rel=1e-3)
    assert found["two"].low < 0.9 < 1.1 < found["two"].high  # the runs differ, which widens the interval
    assert not found["two"].is_clear
