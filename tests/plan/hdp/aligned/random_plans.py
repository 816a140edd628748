"""Random plans for pipelines, and a slow replay that shares no code with the fast replay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.schedule.actions import Action, seq1f1b_schedule
from bytescale_ext.plan.step.check import groups_of
from bytescale_ext.plan.step.micro_batch import MicroBatch
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Slicing

TOKENS_PER_RANK = 64


def random_plan(random: np.random.Generator, num_ranks: int, most_slots: int, aligned: bool = True) -> StepPlan:
    """Return sequences in slots of disjoint runs of ranks. Ranks end at different slots and have some empty slots.

    Without ``aligned`` the rings and their order are the same, but ranks leave out empty slots.
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


def slice_seconds(
    micro_batch: MicroBatch, lengths: Sequence[int], cost: CostModel, cut: CostModel, index: int, num_slices: int
) -> float:
    """Return the seconds of a slice on its rank, shard by shard. The end of a slice is found by bisection."""
    seconds = cost.g
    for shard in micro_batch.shards:
        length, width = lengths[shard.seq], len(shard.ring)
        begin, end = (_end(cut, length, number / num_slices) for number in (index, index + 1))
        if width == 1:
            seconds += cost.shard_cost(shard, length) / num_slices
            continue
        attention = max(cost.a * (end**2 - begin**2), cost.c * end * (width - 1)) / width
        seconds += attention + cost.b * shard.num_tokens * (end - begin) / length
    return seconds


def _end(cut: CostModel, length: int, share: float) -> float:
    low, high = 0.0, float(length)
    for _ in range(60):
        middle = (low + high) / 2
        is_below = cut.a * middle**2 + cut.b * middle < share * (cut.a * length**2 + cut.b * length)
        low, high = (middle, high) if is_below else (low, middle)
    return high


def slow_makespan(plan: StepPlan, stages: Sequence[StageCost], num_chunks: int = 1, num_slices: int = 1) -> float:
    """Run actions of all stages as soon as they can run, and return the time of the last end, or -1 for a deadlock."""
    num_stages = len(stages) // num_chunks
    groups = groups_of(plan)
    lanes: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(groups):
        for stage in range(num_stages):
            schedule = seq1f1b_schedule(num_stages, len(row), Slicing(num_slices), num_chunks) if row else None
            lanes[rank, stage] = list(schedule.stages[stage]) if schedule else []
    stops: dict[tuple[str, int, int, int], float] = {}  # (kind, class, slice, virtual stage)
    free = dict.fromkeys(lanes, 0.0)
    has_run = True
    while has_run:
        has_run = False
        heads = {lane: actions[0] for lane, actions in lanes.items() if actions}
        for (rank, stage), head in heads.items():
            wanted, part, virtual = (
                groups[rank][head.micro_batch],
                head.slice_index,
                head.chunk * num_stages + stage,
            )
            before = ("F", wanted, part, virtual - 1) if head.kind == "F" else ("B", wanted, part, virtual + 1)
            if head.kind == "B" and virtual == len(stages) - 1:
                before = ("F", wanted, part, virtual)
            members = [(r, k) for r, row in enumerate(groups) for k, one in enumerate(row) if one == wanted]
            fed = before in stops or (head.kind == "F" and virtual == 0)
            if not fed or any(lanes[r, stage][:1] != [head._replace(micro_batch=k)] for r, k in members):
                continue
            cost = stages[virtual].forward if head.kind == "F" else stages[virtual].backward
            start = max(stops.get(before, 0.0), *(free[r, stage] for r, _ in members))
            shared = (cost, stages[0].both, part, num_slices)
            stop = start + max(slice_seconds(plan.ranks[r][k], plan.lengths, *shared) for r, k in members)
            stops[head.kind, wanted, part, virtual] = stop
            for r, _ in members:
                free[r, stage] = stop
                lanes[r, stage].pop(0)
            has_run = True
            break
    return -1.0 if any(lanes.values()) else max(free.values(), default=0.0)
