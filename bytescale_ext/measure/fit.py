"""Fits the constants of a cost file to measured times of micro-batches, and says how well they predict.

Micro-batches of one rank are timed in models of two depths, which separates the layers from the head::

    seconds = layers x (a sum(s^2) + b sum(s) + g) + head x sum(s) + rest

The fit is least squares of the relative error, with no constant below zero; the formula is ``CostModel``'s. Where
several ranks measure together, a sequence in a ring takes longer than its share of this work. From the excess follow
the constants of rings: h for each token that a rank receives, m for each block of a sequence, however short.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import ModelShape

Floats = npt.NDArray[np.float64]

LAYERS: Final = (1, 3)
"""Layers of the measured models. The difference of their times is the time of layers; the rest is the head's."""
Ring = tuple[tuple[int, ...], int]
"""Tokens of the sequences of one micro-batch in a ring, and its ranks."""
LEAST_TOKENS: Final = 64
"""The lowest ``--max-tokens``: below it some measured lengths would be equal."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured times of one micro-batch: sequences, each on ``width`` ranks, in a model of ``num_layers`` layers."""

    num_layers: int
    lengths: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float
    width: int = 1


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants of one direction, in seconds: ``layer`` of one layer, ``head`` per token, ``rest`` per micro-batch."""

    layer: CostModel
    head: float
    rest: float

    def whole_layer(self, num_layers: int) -> CostModel:
        """Return the layer of a model of ``num_layers``, its fixed cost including a share of ``rest``."""
        return replace(self.layer, g=self.layer.g + self.rest / num_layers)

    def seconds(self, timing: Timing) -> float:
        """Return the predicted seconds of a micro-batch."""
        layers = self.whole_layer(timing.num_layers).scaled(timing.num_layers)
        work = sum(layers.sequence_cost(length, timing.width) for length in timing.lengths)
        return layers.g + work + self.head * sum(timing.lengths) / timing.width


@dataclass(frozen=True, slots=True)
class Prediction:
    """Measured and predicted seconds of a micro-batch, forward and backward together."""

    num_layers: int
    lengths: tuple[int, ...]
    measured_seconds: float
    predicted_seconds: float
    width: int = 1

    @property
    def error(self) -> float:
        """Relative error: 0.1 when the prediction is ten percent too long."""
        return self.predicted_seconds / self.measured_seconds - 1.0


def fitted_lengths(max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches for the fit, of at most ``max_tokens``: single sequences, and packs of shorter ones.

    Raises:
        ValueError: ``max_tokens`` is below ``LEAST_TOKENS``.
    """
    if max_tokens < LEAST_TOKENS:
        raise ValueError(f"--max-tokens {max_tokens}: give at least {LEAST_TOKENS}")
    parts = [max_tokens // 2**halvings for halvings in range(5)]
    _whole, half, quarter, eighth, sixteenth = parts
    packs = (
        (half,) * 2,
        (eighth,) * 8,
        (sixteenth,) * 4,
        (max_tokens // 32,) * 32,
        (half, *(eighth,) * 4),
        (quarter, *(sixteenth,) * 4),
    )
    return (*((part,) for part in parts), *packs)


def unseen_lengths(max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return micro-batches of other lengths, kept from the fit to judge it."""
    whole, part = max_tokens, max_tokens // 24
    return (
        (whole * 3 // 4,),
        (whole * 3 // 8,),
        (whole * 3 // 16,),
        (part,) * 20,
        (whole * 3 // 5, whole // 5, part, part),
        (whole // 3, part, part),
    )


def fitted_rings(max_tokens: int, num_ranks: int) -> tuple[Ring, ...]:
    """Return sequences in rings for the fit: rings of all ranks, and the narrowest that fill them.

    A rank holds a quarter to a half of ``max_tokens``: of one sequence, so that h contains the fixed cost of a message
    as it is spread over many tokens, and of many short ones, as static context parallelism has them, for m.
    """
    return _rings(max_tokens, num_ranks, ((8, 1), (6, 1), (4, 1), (8, 16)))


def unseen_rings(max_tokens: int, num_ranks: int) -> tuple[Ring, ...]:
    """Return other sequences in rings, kept from the fit to judge it."""
    return _rings(max_tokens, num_ranks, ((7, 1), (5, 1), (6, 12)))


def _rings(max_tokens: int, num_ranks: int, packs: Sequence[tuple[int, int]]) -> tuple[Ring, ...]:
    """Return a ring for each width and pack.

    ``packs``: tokens of each rank, in sixteenths of ``max_tokens``, and the number of equal sequences that they are of.
    """
    narrowest = next((width for width in range(2, num_ranks) if num_ranks % width == 0), num_ranks)
    widths = sorted({narrowest, num_ranks} - {1})
    return tuple(
        ((max_tokens * width * part // 16 // count,) * count, width) for width in widths for part, count in packs
    )


def fit_timings(timings: Sequence[Timing]) -> tuple[Fit, Fit]:
    """Fit the constants of the forward and the backward pass.

    Raises:
        ValueError: the times do not grow with tokens and with their square, so they are noise.
    """
    fits = []
    for direction in ("forward", "backward"):
        seconds = np.array([getattr(timing, f"{direction}_seconds") for timing in timings])
        a, b, g, head, rest = fit_constants(_features(timings), seconds).tolist()
        if not a or not b:
            raise ValueError(
                f"the measured {direction} times are too short or too noisy to tell attention from linear work; "
                "raise --max-tokens or --repeats, or stop other programs on this machine"
            )
        fits.append(Fit(CostModel(a=a, b=b, g=g), head, rest))
    return fits[0], fits[1]


def fit_rings(
    fits: tuple[Fit, Fit], timings: Sequence[Timing], received_seconds: tuple[float, float], has_waits: bool = True
) -> tuple[Fit, Fit]:
    """Return the constants with c, h and m.

    Args:
        fits: forward and backward constants of sequences on one rank.
        timings: of rings.
        received_seconds: c of the exchange alone: forward, backward.
        has_waits: the times include waiting for the exchange, which processor time does not. Then a ring whose exchange
            takes longer than its attention is left out, because the exchange would be counted twice; if all are left
            out, h and m are 0. Only rings of several sequences tell m from h; if there are none, m is 0.
    """
    found = []
    for fit, c, direction in zip(fits, received_seconds, ("forward", "backward"), strict=True):
        least = c / fit.layer.a if has_waits else 0.0
        counted = [one for one in timings if min(one.lengths) >= least * (one.width - 1)]
        constants = {"h": 0.0, "m": 0.0}
        if counted:
            names = ("h", "m") if any(len(one.lengths) > 1 for one in counted) else ("h",)
            layers = {"h": replace(fit.layer, h=1.0), "m": replace(fit.layer, m=1.0)}
            units = [replace(fit, layer=layers[name]) for name in names]
            known = np.array([fit.seconds(one) for one in counted])
            features = np.array([[unit.seconds(one) for unit in units] for one in counted]) - known[:, None]
            seconds = np.array([getattr(one, f"{direction}_seconds") for one in counted])
            constants |= dict(zip(names, fit_constants(features, seconds, known).tolist(), strict=True))
        found.append(replace(fit, layer=replace(fit.layer, c=c, h=constants["h"], m=constants["m"])))
    return found[0], found[1]


def _features(timings: Sequence[Timing]) -> Floats:
    """Return the factors of a, b, g, head and rest in each time: [n, 5], by the cost model with one constant at 1."""
    units = (CostModel(a=1.0, b=0.0), CostModel(a=0.0, b=1.0))
    rows = []
    for timing in timings:
        squares, tokens = (sum(unit.sequence_cost(length, 1) for length in timing.lengths) for unit in units)
        layers = timing.num_layers
        rows.append((layers * squares, layers * tokens, float(layers), tokens, 1.0))
    return np.array(rows)


def fit_constants(features: Floats, seconds: Floats, known: Floats | float = 0.0) -> Floats:
    """Return the constants, none below 0, of the least squared relative error: [n, k] and [n] -> [k].

    ``known``: the part of the seconds that needs no constant, [n] or one for all. Exact: the optimum is the
    unconstrained optimum of some subset of the constants, and k is small.
    """
    weighted = features / seconds[:, None]
    scale = np.abs(weighted).max(axis=0)
    weighted, wanted = weighted / scale, 1.0 - known / seconds
    best, best_loss = np.zeros(features.shape[1]), float(np.square(wanted).sum())
    columns = range(features.shape[1])
    for subset in (chosen for size in columns for chosen in combinations(columns, size + 1)):
        found = np.linalg.lstsq(weighted[:, subset], wanted, rcond=None)[0]
        loss = float(np.square(weighted[:, subset] @ found - wanted).sum())
        if (found >= 0).all() and loss < best_loss * (1 - 1e-12):
            best, best_loss = np.zeros(len(columns)), loss
            best[list(subset)] = found
    return np.asarray(best / scale)


def predictions(fits: tuple[Fit, Fit], timings: Sequence[Timing]) -> list[Prediction]:
    """Return measured and predicted seconds of each micro-batch."""
    found = []
    for timing in timings:
        measured, predicted = timing.forward_seconds + timing.backward_seconds, sum(fit.seconds(timing) for fit in fits)
        found.append(Prediction(timing.num_layers, timing.lengths, measured, predicted, timing.width))
    return found


@dataclass(frozen=True, slots=True)
class Origin:
    """The model and device that costs were measured with; ``source`` describes the measurement for people."""

    shape: ModelShape
    device: str
    dtype: str
    tensor_parallel: int
    source: str


def model_cost(fits: tuple[Fit, Fit], kept_bytes: tuple[float, float], origin: Origin) -> ModelCost:
    """Return the content of a cost file.

    Args:
        fits: forward and backward constants, with c, h and m.
        kept_bytes: bytes of one token in one layer until its backward pass: without and with full recompute.
        origin: the model and the device.
    """
    forward, backward = (fit.whole_layer(origin.shape.num_layers) for fit in fits)
    return ModelCost(
        shape=origin.shape,
        device=origin.device,
        dtype=origin.dtype,
        tensor_parallel=origin.tensor_parallel,
        source=origin.source,
        forward=forward,
        backward=backward,
        head_forward=fits[0].head,
        head_backward=fits[1].head,
        layer_bytes=kept_bytes[0],
        recompute_bytes=kept_bytes[1],
    )


def errors_text(found: Sequence[Prediction]) -> str:
    """Return the median and worst error as text."""
    errors = [abs(one.error) for one in found]
    return f"median {statistics.median(errors):.1%}, worst {max(errors):.1%}"


def prediction_table(found: Sequence[Prediction]) -> str:
    """Return a table: lengths, measured and predicted milliseconds, and error of each micro-batch."""
    lines = [f"{'layers':>6}  {'measured ms':>11}  {'predicted ms':>12}  {'error':>7}  tokens of its sequences"]
    for one in found:
        times = f"{1e3 * one.measured_seconds:11.2f}  {1e3 * one.predicted_seconds:12.2f}  {one.error:+7.1%}"
        ring = f", a ring of {one.width} ranks" if one.width > 1 else ""
        lines.append(f"{one.num_layers:6d}  {times}  {lengths_text(one.lengths)}{ring}")
    return "\n".join(lines)


def lengths_text(lengths: Sequence[int]) -> str:
    """Return lengths as text, runs of equal ones as ``2048 + 4 x 512``."""
    parts: list[list[int]] = []
    for length in lengths:
        if parts and parts[-1][1] == length:
            parts[-1][0] += 1
        else:
            parts.append([1, length])
    return " + ".join(f"{count} x {length}" if count > 1 else str(length) for count, length in parts)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation (Spearman 1904); equal values share a rank. None where a side is all equal."""
    one, other = (_places(np.array(side)) for side in zip(*pairs, strict=True))
    return float(np.corrcoef(one, other)[0, 1]) if np.ptp(one) and np.ptp(other) else None


def _places(values: Floats) -> npt.NDArray[np.int64]:
    """Return twice the mean place of each value in ascending order: [n], as the values."""
    ordered = np.sort(values)
    return np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
