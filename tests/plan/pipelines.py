"""Random plans for pipelines, and a slow replay that shares no code with the fast one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytescale_ext.plan.check import ring_classes
from bytescale_ext.plan.cost import StageCost
from bytescale_ext.plan.placed import PlacedRanks
from bytescale_ext.plan.schedule import stage_actions
from bytescale_ext.plan.shapes import StepPlan

TOKENS_PER_RANK = 64


def random_plan(random: np.random.Generator, num_ranks: int, most_slots: int, aligned: bool = True) -> StepPlan:
    """Sequences in slots of disjoint runs of ranks; ranks end at different slots and have holes in between.

    Not ``aligned``: the same rings in the same order, but a rank leaves out the slots that it does not use.
    """
    rows: list[tuple[int, int, int, int]] = []  # length, first rank, width, slot
    for slot in range(most_slots):
        rank = int(random.integers(0, 2))
        while rank < num_ranks:
            width = int(random.choice([1, 1, 2, 3, 4]))
            width = min(width, num_ranks - rank)
            if random.random() < 0.7:
                rows.append((int(random.integers(width, width * TOKENS_PER_RANK)), rank, width, slot))
            rank += width
    lengths, firsts, widths, slots = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    placed = PlacedRanks(num_ranks, lengths, firsts, widths, slots, aligned=aligned)
    return StepPlan(num_ranks, TOKENS_PER_RANK, tuple(lengths.tolist()), placed, aligned=aligned)


def slow_makespan(plan: StepPlan, stages: Sequence[StageCost], num_chunks: int = 1) -> float:
    """Look at every stage again and again; run what can run. -1 for a deadlock."""
    num_stages = len(stages) // num_chunks
    classes = ring_classes(plan)
    lanes = {
        (rank, stage): list(stage_actions(len(row), stage, num_stages, num_chunks)) if row else []
        for rank, row in enumerate(classes)
        for stage in range(num_stages)
    }
    stops: dict[tuple[str, int, int], float] = {}  # (kind, class, virtual stage)
    free = dict.fromkeys(lanes, 0.0)
    has_run = True
    while has_run:
        has_run = False
        heads = {lane: actions[0] for lane, actions in lanes.items() if actions}
        for (rank, stage), head in heads.items():
            wanted, virtual = classes[rank][head.micro_batch], head.chunk * num_stages + stage
            before = ("F", wanted, virtual - 1) if head.kind == "F" else ("B", wanted, virtual + 1)
            if head.kind == "B" and virtual == len(stages) - 1:
                before = ("F", wanted, virtual)
            members = [(r, k) for r, row in enumerate(classes) for k, one in enumerate(row) if one == wanted]
            fed = before in stops or (head.kind == "F" and virtual == 0)
            if not fed or any(lanes[r, stage][:1] != [head._replace(micro_batch=k)] for r, k in members):
                continue
            cost = stages[virtual].forward if head.kind == "F" else stages[virtual].backward
            start = max(stops.get(before, 0.0), *(free[r, stage] for r, _ in members))
            stop = start + max(cost.micro_batch_cost(plan.ranks[r][k], plan.lengths) for r, k in members)
            stops[head.kind, wanted, virtual] = stop
            for r, _ in members:
                free[r, stage] = stop
                lanes[r, stage].pop(0)
            has_run = True
            break
    return -1.0 if any(lanes.values()) else max(free.values(), default=0.0)
