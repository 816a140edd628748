"""Slices of samples of one length, which a pipeline runs one after another (Seq1F1B, section 3.3).

A slice attends to all earlier slices, so of equally long slices the last slice costs most. The first P tokens cost
``T(P) = a P^2 + b P`` (causal attention and everything linear). All k slices cost the same if slice i (from 1) ends at
the P with ``T(P) = T(S) i / k``. Slices then get shorter::

    tokens  0                                            S
    even    |     0     |     1     |     2     |     3     |
    flops   |        0        |     1     |    2    |   3   |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.model_cost import ModelCost, with_windows
from bytescale_ext.plan.cost.model_shape import (
    ATTENTION_BACKWARD_PER_FORWARD,
    BACKWARD_PER_FORWARD,
    ModelShape,
    attention_flops_per_square,
    layer_flops_per_token,
)

PARTITIONS: Final = ("time", "flops", "even")
"""Quantities that can be equal in all slices: costs of ``layer_cost``, or tokens ("even")."""

TILE: Final = 128
"""Multiple of tokens at which long slices end: the rows that a block of a matrix product computes on a GPU."""

Partition = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SliceRange:
    """Slice ``index`` of a micro-batch: its tokens [start, stop)."""

    index: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the slice."""
        return self.stop - self.start


def parse_partition(text: str) -> Partition:
    """Return a name of ``PARTITIONS``, or the explicit lengths of "L1,...,Lk". Raises ValueError for other text."""
    if text in PARTITIONS:
        return text
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        names = ", ".join(PARTITIONS)
        known = f"give {names}, or the tokens of each slice as L1,...,Lk"
        raise ValueError(f"--seq1f1b-partition {text!r}: {known}") from None


def slice_lengths(
    num_tokens: int, num_slices: int, partition: Partition, cost: CostModel | None = None, multiple: int = 1
) -> tuple[int, ...]:
    """Return the tokens of each slice, in order. All ranks get the same slices.

    Args:
        num_tokens: tokens of the micro-batch.
        num_slices: k, at least 1.
        partition: "even", explicit lengths, or "flops" or "time" for slices of equal ``cost``.
        cost: cost of a slice, in FLOPs or time; only ``a`` and ``b`` count.
        multiple: multiple of tokens in every slice: the tensor-parallel size with sequence parallelism.

    Raises:
        ValueError: there are more slices than multiples, ``num_tokens`` is not a multiple, or explicit lengths do not
            fit. The message names the nearest sizes that fit.
    """
    if num_slices < 1:
        raise ValueError(f"{num_slices} slices of a sequence: use 1 or more")
    if num_tokens < 1 or num_tokens % multiple:
        below = num_tokens - num_tokens % multiple
        near = f"{below} or {below + multiple}" if below > 0 else f"{multiple}"
        raise ValueError(
            f"{num_tokens} tokens cannot be divided into slices of a multiple of {multiple} tokens (the "
            f"tensor-parallel size, for sequence parallelism); the nearest possible lengths are {near}"
        )
    if num_slices * multiple > num_tokens:
        each = "a token" if multiple == 1 else f"{multiple} tokens"
        raise ValueError(
            f"{num_tokens} tokens cannot be divided into {num_slices} slices of at least {each} each; "
            f"use at most {num_tokens // multiple} slices"
        )
    if not isinstance(partition, str):
        _check_explicit(partition, num_tokens, num_slices, multiple)
        return partition
    if partition == "even":
        ends = [num_tokens * index / num_slices for index in range(1, num_slices)]
    else:
        if cost is None:
            raise ValueError(
                f"partition {partition!r} needs the cost of tokens; only even and explicit slices do not need it"
            )
        shares = np.arange(1, num_slices) / num_slices
        ends = cost.end_of_share(np.array(float(num_tokens)), shares, np.ones(1)).tolist()
    tiles = math.lcm(multiple, TILE)
    grain = tiles if num_tokens >= 64 * tiles * num_slices and num_tokens % tiles == 0 else multiple
    return _rounded(ends, num_tokens, grain)


def slice_ranges(lengths: Sequence[int]) -> tuple[SliceRange, ...]:
    """Return consecutive slices of the given lengths, from token 0 on."""
    stops = accumulate(lengths)
    return tuple(SliceRange(i, stop - n, stop) for i, (n, stop) in enumerate(zip(lengths, stops, strict=True)))


def slice_costs(lengths: Sequence[int], cost: CostModel) -> tuple[float, ...]:
    """Return the cost of each slice, ``T(stop) - T(start) + g``. ``lengths``: tokens of each slice."""
    return tuple(
        cost.a * (cost.squares(part.stop) - cost.squares(part.start)) + cost.b * part.num_tokens + cost.g
        for part in slice_ranges(lengths)
    )


def layer_cost(shape: ModelShape, partition: str, measured: ModelCost | None = None) -> StageCost:
    """Return the cost of one layer. Embedding and output layer are not part of it.

    "time" takes the measured costs. Without measured costs it counts FLOPs, where the backward pass of attention has
    2.5 times the FLOPs of the forward pass, because kernels recompute scores. "flops" (and "even") counts 2 times for
    all work, as the paper does (Seq1F1B Eq. 3 counts the forward pass; a constant factor does not move a boundary).
    """
    if partition == "time" and measured is not None:
        return measured.stage(1)
    a = attention_flops_per_square(replace(shape, later_layers=0)) / shape.num_layers
    b = layer_flops_per_token(shape)
    attention_factor = ATTENTION_BACKWARD_PER_FORWARD if partition == "time" else BACKWARD_PER_FORWARD
    full = CostModel(a, b), CostModel(attention_factor * a, BACKWARD_PER_FORWARD * b)
    forward, backward = (with_windows(cost, shape) for cost in full)
    return StageCost(forward, backward)


def _rounded(ends: Sequence[float], num_tokens: int, grain: int) -> tuple[int, ...]:
    """Return the lengths of non-empty slices that end near ``ends``, at multiples of ``grain``."""
    num_grains = num_tokens // grain
    bounds = [0]
    for index, end in enumerate(ends):
        slices_behind = len(ends) - index
        bounds.append(min(max(math.floor(end / grain + 0.5), bounds[-1] + 1), num_grains - slices_behind))
    bounds.append(num_grains)
    return tuple((stop - start) * grain for start, stop in pairwise(bounds))


def _check_explicit(lengths: tuple[int, ...], num_tokens: int, num_slices: int, multiple: int) -> None:
    """Raise ValueError with the nearest list that fits if explicit lengths do not fit."""
    is_partition = len(lengths) == num_slices and sum(lengths) == num_tokens and min(lengths) > 0
    if is_partition and not any(length % multiple for length in lengths):
        return
    positive = [max(length, 1) for length in lengths[:num_slices]]
    positive += [max(1, num_tokens // num_slices)] * (num_slices - len(positive))
    scale = num_tokens / sum(positive)
    ends = [stop * scale for stop in accumulate(positive)][:-1]
    near = ",".join(map(str, _rounded(ends, num_tokens, multiple)))
    each = f", each a multiple of {multiple}" if multiple > 1 else ""
    raise ValueError(
        f"slices of {','.join(map(str, lengths))} tokens: give {num_slices} slices of {num_tokens} tokens in "
        f"total{each}; the nearest lengths that fit are {near}"
    )
