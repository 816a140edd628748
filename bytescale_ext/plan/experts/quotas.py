"""How the tokens of an expert are shared by the ranks that hold it: as evenly as the placement allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytescale_ext.plan.experts.placement import PARTS, Bools, Floats, Ints

SWEEPS = 4
"""Times that the tokens of every shared expert are poured anew."""


def poured(tokens: float, levels: Sequence[float]) -> list[float]:
    """Return how much of ``tokens`` each rank takes so that the lowest levels rise to a common one (water filling)."""
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
    """Move tokens [ranks, experts] among the ranks that hold their expert, until the ranks are level.

    Pouring each expert anew onto the others, again and again, leads to the least sum of squares, and so to the least
    maximum. ``held``: [ranks, experts], homes too. ``tokens`` is changed.
    """
    of_rank = tokens.sum(1)
    shared = [int(expert) for expert in np.flatnonzero(held.sum(0) > 1) if tokens[:, expert].any()]
    shared.sort(key=lambda expert: -float(tokens[:, expert].sum()))
    for _ in range(sweeps):
        for expert in shared:
            pour(tokens, of_rank, np.flatnonzero(held[:, expert]), expert)


def pour(tokens: Floats, of_rank: Floats, ranks: Ints, expert: int) -> None:
    """Share the tokens of one expert anew among ``ranks`` [n], given ``of_rank`` [ranks]; both arrays are changed.

    ``tokens``: [ranks, experts].
    """
    column = tokens[:, expert]
    of_rank -= column
    total = float(column.sum())
    column[:] = 0.0
    column[ranks] = poured(total, of_rank[ranks].tolist())
    of_rank += column


def as_parts(tokens: Floats, homes: Bools) -> Ints:
    """Return the parts [ranks, experts] nearest to tokens [ranks, experts]; experts without tokens stay at home.

    ``homes``: [ranks, experts].
    """
    total = tokens.sum(0)
    exact = np.where(total > 0, tokens / np.maximum(total, 1e-30), homes) * PARTS
    parts = np.floor(exact).astype(np.int64)
    missing = PARTS - parts.sum(0)
    order = np.argsort(-(exact - parts), axis=0, kind="stable")  # largest remainders first
    ranking = np.argsort(order, axis=0, kind="stable")
    return np.asarray(parts + (ranking < missing))
