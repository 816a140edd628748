"""Loss curves of small runs on each source, and the weights that they propose, with confidence intervals.

A token of a source with a falling loss is worth more than a token of a source that is already learned. Curves have the
form ``E + B n^-b`` of scaling laws, where n is the number of tokens. The gain of a source is the decrease of its fitted
loss if the number of tokens is doubled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

EXPONENTS: Final = np.linspace(0.05, 1.5, 30)
_BLOCK: Final = 4  # steps of a block of residuals; neighbouring residuals are correlated
LEAST_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class Curve:
    """A fitted loss curve ``floor + scale * tokens ** -exponent``."""

    floor: float
    scale: float
    exponent: float

    def loss(self, tokens: np.ndarray | float) -> np.ndarray:
        """Return the loss after ``tokens``, a scalar or [n], in the same shape."""
        return self.floor + self.scale * np.asarray(tokens, float) ** -self.exponent

    def gain(self, tokens: float) -> float:
        """Return the decrease of the loss from ``tokens`` to twice as many tokens."""
        return float(self.loss(tokens) - self.loss(2 * tokens))


@dataclass(frozen=True, slots=True)
class Proposal:
    """Proposed change to the share of a source.

    Attributes:
        gain: decrease of the loss if the tokens of the source are doubled.
        factor: multiplier of the share: gain over the mean gain of all sources.
        low: lower end of the interval of 80 % of the factors of resampled runs.
        high: upper end of the interval.
    """

    gain: float
    factor: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 1. If not, the share does not change."""
        return self.low > 1 or self.high < 1


def fit(tokens: np.ndarray, losses: np.ndarray) -> Curve:
    """Return the least-squares curve with non-negative floor and scale. ``tokens`` and ``losses``: [n]."""
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
    """Return the proposal for each source.

    Args:
        runs: (tokens [n], losses [n]) of the runs of each source, which differ by their seed. The first quarter of each
            run is ignored, because there every loss falls.
        draws: number of bootstrap samples, which draw runs and blocks of their residuals with replacement.
        seed: seed of the bootstrap.

    Raises:
        ValueError: a run has too few steps, or no loss falls.
    """
    settled = {name: [_settled(*run) for run in of_source] for name, of_source in runs.items()}
    curves = {name: [fit(*run) for run in of_source] for name, of_source in settled.items()}
    gains = _gains(settled, curves)
    if not gains.sum() > 0:
        raise ValueError("no loss falls in the small runs: give more --proxy-steps")
    random, factors = np.random.RandomState(seed), []
    for _ in range(draws):
        sample = {
            name: [_resampled(of_source, curves[name], random) for _ in of_source]
            for name, of_source in settled.items()
        }
        sample_gains = _gains(sample, {name: [fit(*run) for run in of_source] for name, of_source in sample.items()})
        if sample_gains.sum() > 0:
            factors.append(sample_gains / sample_gains.mean())
    low, high = np.quantile(np.array(factors), (0.1, 0.9), axis=0)
    factor = gains / gains.mean()
    return {name: Proposal(*map(float, (gains[i], factor[i], low[i], high[i]))) for i, name in enumerate(runs)}


def _settled(tokens: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and losses, [m], of a run [n] without its first quarter."""
    if len(tokens) < LEAST_STEPS:
        raise ValueError(f"a small run has {len(tokens)} steps: give --proxy-steps {LEAST_STEPS} or more")
    begin = len(tokens) // 4
    return np.asarray(tokens[begin:], float), np.asarray(losses[begin:], float)


def _gains(
    runs: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]], curves: Mapping[str, Sequence[Curve]]
) -> np.ndarray:
    """Return the mean gain of each source at the end of the shortest run: float64 [sources]."""
    end = min(float(tokens[-1]) for of_source in runs.values() for tokens, _ in of_source)
    return np.array([np.mean([curve.gain(end) for curve in of_source]) for of_source in curves.values()])


def _resampled(
    runs: Sequence[tuple[np.ndarray, np.ndarray]], curves: Sequence[Curve], random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Return a random run with its residuals resampled in blocks."""
    number = random.randint(len(runs))
    tokens, losses = runs[number]
    smooth = curves[number].loss(tokens)
    residuals = losses - smooth
    blocks = -(-len(tokens) // _BLOCK)
    starts = random.randint(0, max(len(tokens) - _BLOCK, 0) + 1, blocks)
    drawn = np.concatenate([residuals[start : start + _BLOCK] for start in starts])[: len(tokens)]
    return tokens, smooth + drawn
