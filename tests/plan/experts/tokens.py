"""Send tokens to slots one by one, in plain loops: what the arrays of cost model and dispatch are compared with."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from bytescale_ext.plan.experts.placement import EMPTY, PARTS, PlacementPlan


def destinations(plan: PlacementPlan, loads: np.ndarray) -> dict[tuple[int, int], list[int]]:
    """Return the ranks that the tokens of (source, expert) go to, in the order of the tokens.

    Each copy of an expert has room for its quota, rounded so that all tokens fit. Tokens go to the copy on their own
    rank as long as it has room. The others, source by source, fill the rooms that are left, rank by rank.

    Args:
        plan: of the layer.
        loads: [sources, experts] tokens; sources are ranks.
    """
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for expert in range(plan.num_experts):
        rooms = rooms_of(plan, expert, int(loads[:, expert].sum()))
        waiting: list[int] = []
        for source in range(plan.num_ranks):
            for _ in range(int(loads[source, expert])):
                if rooms[source]:
                    rooms[source] -= 1
                    found[source, expert].append(source)
                else:
                    waiting.append(source)
        for source in waiting:
            rank = next(rank for rank, room in enumerate(rooms) if room)
            rooms[rank] -= 1
            found[source, expert].append(rank)
        assert not any(rooms)
    return found


def rooms_of(plan: PlacementPlan, expert: int, num_tokens: int) -> list[int]:
    """Return how many tokens of an expert each rank computes: rank by rank, up to the rounded sum of quotas so far."""
    rooms, parts, given = [], 0, 0
    for experts, quotas in zip(plan.slots, plan.quotas, strict=True):
        parts += sum(quota for one, quota in zip(experts, quotas, strict=True) if one == expert != EMPTY)
        rooms.append(parts * num_tokens // PARTS - given)
        given += rooms[-1]
    return rooms
