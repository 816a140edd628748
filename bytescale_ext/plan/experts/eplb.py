"""DeepSeek's expert placement (EPLB): replicas for the experts with most tokens per copy, packed from scratch.

Each further replica goes to the expert that has most tokens for each of its copies. Replicas are placed heaviest first,
each on the rank with the least tokens that has an empty slot. Copies of an expert share its tokens equally. Homes stay
where they are, which EPLB, made for inference, does not need.
"""

from __future__ import annotations

import numpy as np

from bytescale_ext.plan.experts.placement import PARTS, Ints, PlacementPlan, homes_of


def packed(plan: PlacementPlan, loads: Ints) -> PlacementPlan:
    """Return the next plan, which does not depend on the placement of ``plan``. ``loads``: [ranks, experts]."""
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
        able = (free > 0) & ~held[:, expert]
        if able.any():
            rank = int(np.where(able, of_rank, np.inf).argmin())
            held[rank, expert] = True
            free[rank] -= 1
            of_rank[rank] += per_copy[expert]
    return PlacementPlan.of(_equal_parts(held), plan.num_slots)


def _equal_parts(held: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Ints:
    """Return equal parts [ranks, experts] for all copies of an expert. ``held``: [ranks, experts]."""
    each, rest = np.divmod(PARTS, held.sum(0))
    return np.where(held, each + (held.cumsum(0) <= rest), 0)
