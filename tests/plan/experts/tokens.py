"""Token-by-token dispatch to slots in simple loops, as a reference for the cost model and the dispatcher."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from bytescale_ext.plan.experts.placement import EMPTY, PARTS, PlacementPlan


def destinations(plan: PlacementPlan, loads: np.ndarray) -> dict[tuple[int, int], list[int]]:
    """Return the target ranks of the tokens of (source, expert), in the order of the tokens.

    Each copy of an expert has room for its quota, rounded so that all tokens fit. Tokens go to the
    copy on their source rank while it has room. The remaining tokens, source by source, fill the remaining room, rank
    by rank.

    Args:
        plan: plan of the layer.
        loads: tokens of each rank for each expert, [sources, experts].
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
    """Return the tokens of an expert that each rank computes, from rounded cumulative quotas."""
    rooms, parts, given = [], 0, 0
    for experts, quotas in zip(plan.slots, plan.quotas, strict=True):
        parts += sum(quota for one, quota in zip(experts, quotas, strict=True) if one == expert != EMPTY)
        rooms.append(parts * num_tokens // PARTS - given)
        given += rooms[-1]
    return rooms
