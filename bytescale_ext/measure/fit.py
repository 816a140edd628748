"""Fit of the constants of a cost file to measured times of micro-batches, and the error of its predictions.

Micro-batches of one rank are timed in models with two numbers of layers, which separates the layers from the head::

    seconds = layers x (a sum(s^2) + b sum(s) + g) + head x sum(s) + rest

The formula is the formula of ``CostModel``. The fit minimizes the squared relative error with non-negative constants.
A sequence in a ring takes longer than its share of this work. The excess determines the constants of rings: h for each
token that a rank receives, and m for each block of a sequence, whatever its length.
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
"""Numbers of layers of the measured models. The difference of their times is the time of two layers."""
Ring = tuple[tuple[int, ...], int]
"""Lengths of the sequences of one micro-batch in a ring, and the number of ranks of the ring."""
LEAST_TOKENS: Final = 64
"""Smallest ``--max-tokens``: below it some measured lengths would be equal."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured times of one micro-batch.

    Attributes:
        num_layers: number of layers of the model.
        lengths: lengths of the sequences.
        forward_seconds: time of the forward pass.
        backward_seconds: time of the backward pass.
        width: number of ranks that share each sequence.
    """

    num_layers: int
    lengths: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float
    width: int = 1


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants of the forward or the backward pass, in seconds.

    Attributes:
        layer: cost of one layer.
        head: cost of the output head per token.
        rest: fixed cost of a micro-batch outside of the layers.
    """

    layer: CostModel
    head: float
    rest: float

    def whole_layer(self, num_layers: int) -> CostModel:
        """Return the cost of one layer, which includes an equal share of ``rest``."""
        return replace(self.layer, g=self.layer.g + self.rest / num_layers)

    def seconds(self, timing: Timing) -> float:
        """Return the predicted seconds of a micro-batch."""
        layers = self.whole_layer(timing.num_layers).scaled(timing.num_layers)
        work = sum(layers.sequence_cost(length, timing.width) for length in timing.lengths)
        return layers.g + work + self.head * sum(timing.lengths) / timing.width


@dataclass(frozen=True, slots=True)
class Prediction:
    """Measured and predicted seconds of a micro-batch, forward plus backward; other attributes as in ``Timing``."""

    num_layers: int
    lengths: tuple[int, ...]
    measured_seconds: float
    predicted_seconds: float
    width: int = 1

    @property
    def error(self) -> float:
        """Relative error: 0.1 if the prediction is ten percent too long."""
        return self.predicted_seconds / self.measured_seconds - 1.0


def fitted_lengths(max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return the sequence lengths of the micro-batches to fit: single sequences, and packs of shorter sequences.

    Each micro-batch has at most ``max_tokens`` tokens. Raises ValueError if ``max_tokens`` is below ``LEAST_TOKENS``.
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
    """Return the sequence lengths of micro-batches that are not fitted, to measure the error of the fit."""
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
    """Return rings to fit: rings of all ranks, and of the smallest number of ranks that divides them.

    A rank has a quarter to a half of ``max_tokens``. Single long sequences determine h, which includes the fixed cost
    of a message spread over many tokens. Many short sequences, as in static context parallelism, determine m.
    """
    return _rings(max_tokens, num_ranks, ((8, 1), (6, 1), (4, 1), (8, 16)))


def virtual_rings(max_tokens: int) -> tuple[Ring, ...]:
    """Return the rings whose blocks a single rank measures.

    Each of the 4 virtual ranks has a sixteenth or an eighth of ``max_tokens``.
    """
    whole, part = max_tokens // 2, max_tokens // 8
    return (((whole,), 4), ((whole // 2,), 4), ((part,) * 4, 4))


def unseen_rings(max_tokens: int, num_ranks: int) -> tuple[Ring, ...]:
    """Return rings that are not fitted, to measure the error of the fit."""
    return _rings(max_tokens, num_ranks, ((7, 1), (5, 1), (6, 12)))


def _rings(max_tokens: int, num_ranks: int, packs: Sequence[tuple[int, int]]) -> tuple[Ring, ...]:
    """Return a ring for each width and pack.

    ``packs``: (tokens of each rank in sixteenths of ``max_tokens``, number of equal sequences) of each pack.
    """
    narrowest = next((width for width in range(2, num_ranks) if num_ranks % width == 0), num_ranks)
    widths = sorted({narrowest, num_ranks} - {1})
    return tuple(
        ((max_tokens * width * part // 16 // count,) * count, width) for width in widths for part, count in packs
    )


def fit_timings(timings: Sequence[Timing]) -> tuple[Fit, Fit]:
    """Return the fitted constants of the forward and the backward pass.

    Raises:
        ValueError: the times do not grow with the tokens and with their square, so they are noise.
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
    """Return the forward and backward constants with c, h and m of rings added.

    A ring whose exchange takes longer than its attention is not fitted if the times include waiting for the exchange,
    because the exchange would count twice. Without any fitted ring h and m are 0. Only rings with several sequences
    distinguish m from h; without them m is 0.

    Args:
        fits: forward and backward constants of sequences on one rank.
        timings: times of rings.
        received_seconds: c of the forward and the backward pass, measured for the exchange alone.
        has_waits: whether the times include waiting for the exchange; processor time does not.
    """
    ring_fits = []
    for fit, c, direction in zip(fits, received_seconds, ("forward", "backward"), strict=True):
        least = c / fit.layer.a if has_waits else 0.0
        fitted = [timing for timing in timings if min(timing.lengths) >= least * (timing.width - 1)]
        constants = {"h": 0.0, "m": 0.0}
        if fitted:
            names = ("h", "m") if any(len(timing.lengths) > 1 for timing in fitted) else ("h",)
            layers = {"h": replace(fit.layer, h=1.0), "m": replace(fit.layer, m=1.0)}
            units = [replace(fit, layer=layers[name]) for name in names]
            known = np.array([fit.seconds(timing) for timing in fitted])
            features = np.array([[unit.seconds(timing) for unit in units] for timing in fitted]) - known[:, None]
            seconds = np.array([getattr(timing, f"{direction}_seconds") for timing in fitted])
            constants |= dict(zip(names, fit_constants(features, seconds, known).tolist(), strict=True))
        ring_fits.append(replace(fit, layer=replace(fit.layer, c=c, h=constants["h"], m=constants["m"])))
    return ring_fits[0], ring_fits[1]


def with_blocks(fits: tuple[Fit, Fit], rings: Sequence[Ring], seconds: Sequence[tuple[float, float]]) -> list[Timing]:
    """Return the times of rings in a model of one layer whose blocks were measured without their layer.

    Args:
        fits: forward and backward constants of sequences on one rank.
        rings: the measured rings.
        seconds: forward and backward seconds of each ring beyond a rank's share of the work.
    """
    timings = []
    for (lengths, width), (forward, backward) in zip(rings, seconds, strict=True):
        share = Timing(1, lengths, 0.0, 0.0, width)
        forward, backward = fits[0].seconds(share) + forward, fits[1].seconds(share) + backward
        timings.append(replace(share, forward_seconds=forward, backward_seconds=backward))
    return timings


def _features(timings: Sequence[Timing]) -> Floats:
    """Return the factors of a, b, g, head and rest in the seconds of each timing: [n, 5]."""
    units = (CostModel(a=1.0, b=0.0), CostModel(a=0.0, b=1.0))
    rows = []
    for timing in timings:
        squares, tokens = (sum(unit.sequence_cost(length, 1) for length in timing.lengths) for unit in units)
        layers = timing.num_layers
        rows.append((layers * squares, layers * tokens, float(layers), tokens, 1.0))
    return np.array(rows)


def fit_constants(features: Floats, seconds: Floats, known: Floats | float = 0.0) -> Floats:
    """Return the non-negative constants, [k], that minimize the squared relative error of the predicted seconds.

    The result is exact: the optimum is the unconstrained optimum of a subset of the constants, and k is small enough to
    try all subsets.

    Args:
        features: factor of each constant in each time, [n, k].
        seconds: measured times, [n].
        known: part of each time that does not depend on the constants, [n] or a scalar.
    """
    weighted = features / seconds[:, None]
    scale = np.abs(weighted).max(axis=0)
    weighted, target = weighted / scale, 1.0 - known / seconds
    best, best_loss = np.zeros(features.shape[1]), float(np.square(target).sum())
    columns = range(features.shape[1])
    for subset in (chosen for size in columns for chosen in combinations(columns, size + 1)):
        constants = np.linalg.lstsq(weighted[:, subset], target, rcond=None)[0]
        loss = float(np.square(weighted[:, subset] @ constants - target).sum())
        if (constants >= 0).all() and loss < best_loss * (1 - 1e-12):
            best, best_loss = np.zeros(len(columns)), loss
            best[list(subset)] = constants
    return np.asarray(best / scale)


def predict(fits: tuple[Fit, Fit], timings: Sequence[Timing]) -> list[Prediction]:
    """Return measured and predicted seconds of each micro-batch."""
    predictions = []
    for timing in timings:
        measured, predicted = timing.forward_seconds + timing.backward_seconds, sum(fit.seconds(timing) for fit in fits)
        predictions.append(Prediction(timing.num_layers, timing.lengths, measured, predicted, timing.width))
    return predictions


@dataclass(frozen=True, slots=True)
class Origin:
    """Model and device of the measurement.

    Attributes:
        shape: shape of the model.
        device: name of the device.
        dtype: parameter type, for example "bfloat16".
        tensor_parallel: number of tensor-parallel ranks.
        source: description of the measurement for the reader of the file.
    """

    shape: ModelShape
    device: str
    dtype: str
    tensor_parallel: int
    source: str


def model_cost(fits: tuple[Fit, Fit], kept_bytes: tuple[float, float], origin: Origin) -> ModelCost:
    """Return the content of a cost file.

    Args:
        fits: forward and backward constants, including c, h and m.
        kept_bytes: bytes kept per token and layer until the backward pass, without and with full recomputation.
        origin: model and device of the measurement.
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


def errors_text(predictions: Sequence[Prediction]) -> str:
    """Return the median and the worst absolute error as text."""
    errors = [abs(prediction.error) for prediction in predictions]
    return f"median {statistics.median(errors):.1%}, worst {max(errors):.1%}"


def prediction_table(predictions: Sequence[Prediction]) -> str:
    """Return a table of layers, measured and predicted milliseconds, error and sequence lengths of each micro-batch."""
    lines = [f"{'layers':>6}  {'measured ms':>11}  {'predicted ms':>12}  {'error':>7}  sequence lengths"]
    for item in predictions:
        times = f"{1e3 * item.measured_seconds:11.2f}  {1e3 * item.predicted_seconds:12.2f}  {item.error:+7.1%}"
        ring = f", a ring of {item.width} ranks" if item.width > 1 else ""
        lines.append(f"{item.num_layers:6d}  {times}  {lengths_text(item.lengths)}{ring}")
    return "\n".join(lines)


def lengths_text(lengths: Sequence[int]) -> str:
    """Return lengths as text, with runs of equal lengths joined: ``2048 + 4 x 512``."""
    parts: list[list[int]] = []
    for length in lengths:
        if parts and parts[-1][1] == length:
            parts[-1][0] += 1
        else:
            parts.append([1, length])
    return " + ".join(f"{count} x {length}" if count > 1 else str(length) for count, length in parts)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation (Spearman 1904), or None if all first or all second values are equal.

    Equal values share their mean rank.
    """
    first, second = (_doubled_ranks(np.array(side)) for side in zip(*pairs, strict=True))
    return float(np.corrcoef(first, second)[0, 1]) if np.ptp(first) and np.ptp(second) else None


def _doubled_ranks(values: Floats) -> npt.NDArray[np.int64]:
    """Return twice the mean rank of each value in ascending order, [n], for values [n]."""
    ordered = np.sort(values)
    return np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
