"""Quotas: the tokens of an expert are divided among the ranks that have it, as evenly as the placement allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytescale_ext.plan.experts.placement import PARTS, Bools, Floats, Ints

SWEEPS = 4
"""Number of times that the tokens of every shared expert are redistributed."""


def poured(tokens: float, levels: Sequence[float]) -> list[float]:
    """Return the tokens that each rank receives by water filling, which raises the lowest levels to a common level.

    Args:
        tokens: tokens to distribute.
        levels: tokens that each rank already has.
    """
    order = sorted(range(len(levels)), key=lambda rank: levels[rank])
    total, count = tokens, 0
    for count, rank in enumerate(order):
        if count and total / count <= levels[rank]:
            break
        total += levels[rank]
    else:
        count = len(order)
    surface = total / count
    return [max(0.0, surface - level) for level in levels]


def level_out(tokens: Floats, held: Bools, sweeps: int = SWEEPS) -> None:
    """Redistribute the tokens of shared experts in place, so that all ranks have about the same number of tokens.

    Each sweep redistributes the tokens of every shared expert, given all other tokens. Sweeps converge to the smallest
    sum of squares over ranks, which is also the smallest maximum.

    Args:
        tokens: tokens of each expert that each rank computes, [ranks, experts].
        held: whether a rank has an expert, as its home or as a replica, [ranks, experts].
        sweeps: number of sweeps.
    """
    of_rank = tokens.sum(1)
    shared = [int(expert) for expert in np.flatnonzero(held.sum(0) > 1) if tokens[:, expert].any()]
    shared.sort(key=lambda expert: -float(tokens[:, expert].sum()))
    for _ in range(sweeps):
        for expert in shared:
            pour(tokens, of_rank, np.flatnonzero(held[:, expert]), expert)


def pour(tokens: Floats, of_rank: Floats, ranks: Ints, expert: int) -> None:
    """Redistribute the tokens of one expert among some ranks, in place.

    Args:
        tokens: tokens of each expert that each rank computes, [ranks, experts]; updated.
        of_rank: tokens of each rank, [ranks]; updated.
        ranks: ranks that have the expert, [n].
        expert: number of the expert.
    """
    column = tokens[:, expert]
    of_rank -= column
    total = float(column.sum())
    column[:] = 0.0
    column[ranks] = poured(total, of_rank[ranks].tolist())
    of_rank += column


def as_parts(tokens: Floats, homes: Bools) -> Ints:
    """Return the parts nearest to the given tokens: [ranks, experts]. Experts without tokens stay at home.

    Args:
        tokens: tokens of each expert that each rank computes, [ranks, experts].
        homes: whether each rank is the home of each expert, [ranks, experts].
    """
    total = tokens.sum(0)
    exact = np.where(total > 0, tokens / np.maximum(total, 1e-30), homes) * PARTS
    parts = np.floor(exact).astype(np.int64)
    missing = PARTS - parts.sum(0)
    order = np.argsort(-(exact - parts), axis=0, kind="stable")  # largest remainders first
    ranking = np.argsort(order, axis=0, kind="stable")
    return np.asarray(parts + (ranking < missing))
