"""Loss curves of small runs on each source, and what they say about its weight, with intervals; pure.

A source whose loss still falls gives more for a token than one that is learned. Curves are fitted as
``E + B n^-b`` over the tokens n (the form of scaling laws), and the gain of a source is how much its fitted loss falls
when the tokens are doubled once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

EXPONENTS: Final = np.linspace(0.05, 1.5, 30)
_BLOCK: Final = 4  # residuals of neighbouring steps belong together
LEAST_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class Curve:
    """A fitted loss curve ``floor + scale * tokens ** -exponent``."""

    floor: float
    scale: float
    exponent: float

    def loss(self, tokens: np.ndarray | float) -> np.ndarray:
        """Return the loss after ``tokens``: a number or an array [n]; the same shape."""
        return self.floor + self.scale * np.asarray(tokens, float) ** -self.exponent

    def gain(self, tokens: float) -> float:
        """Return how much the loss falls from ``tokens`` to twice as many."""
        return float(self.loss(tokens) - self.loss(2 * tokens))


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the runs say about the share of a source.

    Attributes:
        gain: how much its loss falls when its tokens are doubled.
        factor: its gain over the mean gain, by which its share is multiplied.
        low, high: the interval that holds 80 % of the factors of resampled runs.
        is_clear: whether the interval lies on one side of 1. If not, the share stays as it was.
    """

    gain: float
    factor: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the runs tell this source from the mean."""
        return self.low > 1 or self.high < 1


def fit(tokens: np.ndarray, losses: np.ndarray) -> Curve:
    """Return the curve with least squares, with a floor and a scale of 0 or more. ``tokens``, ``losses``: [n]."""
    best, least = Curve(float(losses.mean()), 0.0, 1.0), float(((losses - losses.mean()) ** 2).sum())
    for exponent in EXPONENTS.tolist():
        powers = tokens**-exponent
        centred = powers - powers.mean()
        scale = max(float(centred @ (losses - losses.mean()) / (centred @ centred)), 0.0)
        floor = float(losses.mean() - scale * powers.mean())
        if floor < 0:
            floor, scale = 0.0, float(powers @ losses / (powers @ powers))
        error = float(((floor + scale * powers - losses) ** 2).sum())
        if error < least:
            best, least = Curve(floor, scale, exponent), error
    return best


def propose(
    runs: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]], draws: int = 200, seed: int = 1234
) -> dict[str, Proposal]:
    """Return what the runs say about each source.

    Args:
        runs: (tokens [n], losses [n]) of the runs of each source, one for each seed. The first quarter of a run, in
            which any loss falls, is left out.
        draws: of the resampling: runs are drawn again, and blocks of their residuals.
        seed: of the resampling.

    Raises:
        ValueError: a run has too few steps, or no loss falls.
    """
    cut = {name: [_settled(*one) for one in several] for name, several in runs.items()}
    fitted = {name: [fit(*one) for one in several] for name, several in cut.items()}
    gains = _gains(cut, fitted)
    if not gains.sum() > 0:
        raise ValueError("no loss falls in the small runs: give more --proxy-steps")
    random, factors = np.random.RandomState(seed), []
    for _ in range(draws):
        drawn = {name: [_resampled(cut[name], fitted[name], random) for _ in several] for name, several in cut.items()}
        again = _gains(drawn, {name: [fit(*one) for one in several] for name, several in drawn.items()})
        if again.sum() > 0:
            factors.append(again / again.mean())
    low, high = np.quantile(np.array(factors), (0.1, 0.9), axis=0)
    own = gains / gains.mean()
    return {name: Proposal(*map(float, (gains[i], own[i], low[i], high[i]))) for i, name in enumerate(runs)}


def _settled(tokens: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(tokens) < LEAST_STEPS:
        raise ValueError(f"a small run has {len(tokens)} steps: give --proxy-steps {LEAST_STEPS} or more")
    begin = len(tokens) // 4
    return np.asarray(tokens[begin:], float), np.asarray(losses[begin:], float)


def _gains(
    runs: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]], curves: Mapping[str, Sequence[Curve]]
) -> np.ndarray:
    """Return the mean gain of each source at the fewest tokens that any run ends with: float64 [sources]."""
    end = min(float(tokens[-1]) for several in runs.values() for tokens, _ in several)
    return np.array([np.mean([curve.gain(end) for curve in several]) for several in curves.values()])


def _resampled(
    runs: Sequence[tuple[np.ndarray, np.ndarray]], curves: Sequence[Curve], random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Return one of the runs, drawn at random, with its residuals drawn again in blocks."""
    number = random.randint(len(runs))
    tokens, losses = runs[number]
    smooth = curves[number].loss(tokens)
    residuals = losses - smooth
    blocks = -(-len(tokens) // _BLOCK)
    starts = random.randint(0, max(len(tokens) - _BLOCK, 0) + 1, blocks)
    drawn = np.concatenate([residuals[start : start + _BLOCK] for start in starts])[: len(tokens)]
    return tokens, smooth + drawn
