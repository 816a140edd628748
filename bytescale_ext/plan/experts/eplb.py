"""DeepSeek's expert placement (EPLB), which packs replicas from scratch at every plan.

Each replica is given to the expert with the most tokens per copy. Then the replicas are placed in order of their
tokens, largest first, each on the rank that has the fewest tokens and an empty slot. Copies of an expert share its
tokens equally. Unlike EPLB, which is for inference, homes never move.
"""

from __future__ import annotations

import numpy as np

from bytescale_ext.plan.experts.placement import PARTS, Ints, PlacementPlan, homes_of


def packed(plan: PlacementPlan, loads: Ints) -> PlacementPlan:
    """Return the next plan. Only the sizes of ``plan`` matter, not its placement. ``loads``: [ranks, experts]."""
    num_ranks, num_experts = plan.num_ranks, plan.num_experts
    total, copies = loads.sum(0), np.ones(num_experts, np.int64)
    free = np.full(num_ranks, plan.num_slots - num_experts // num_ranks)
    for _ in range(int(free.sum())):
        copies[np.where(copies < num_ranks, total / copies, -1.0).argmax()] += 1
    held = homes_of(num_experts, num_ranks)
    per_copy = total / copies
    of_rank = (held * per_copy).sum(1)
    replicas = np.repeat(np.arange(num_experts), copies - 1)
    for expert in replicas[np.argsort(-per_copy[replicas], kind="stable")].tolist():
        has_room = (free > 0) & ~held[:, expert]
        if has_room.any():
            rank = int(np.where(has_room, of_rank, np.inf).argmin())
            held[rank, expert] = True
            free[rank] -= 1
            of_rank[rank] += per_copy[expert]
    return PlacementPlan.of(_equal_parts(held), plan.num_slots)


def _equal_parts(held: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Ints:
    """Return equal parts for all copies of each expert: [ranks, experts].

    ``held``: whether a rank has a copy of an expert, [ranks, experts].
    """
    share, remainder = np.divmod(PARTS, held.sum(0))
    return np.where(held, share + (held.cumsum(0) <= remainder), 0)
