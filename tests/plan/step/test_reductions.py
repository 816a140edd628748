"""The order of exchanges and gradient reductions: no rank waits forever, even if each waits for all that it has posted.

Every exchange and reduction is played as a meeting: it happens once it is next on all its ranks. If all meetings of a
step happen, they have a common order, so any weaker wait of a host ends too.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.micro_batch import MicroBatch
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.reductions import overlapping_ranks
from bytescale_ext.plan.step.sizes import Cluster
from tests.plan.step.broken_plans import good_rows, local, member, plan_of

LAYERS = 3
Meeting = tuple[Hashable, tuple[int, ...]]


def meetings_of(rank: int, plan: StepPlan, num_run: int, expert_ranks: int, overlaps: bool) -> list[Meeting]:
    """Return the exchanges and reductions of a rank in order, each with its ranks."""
    everyone = tuple(range(plan.num_ranks))
    first = rank // expert_ranks * expert_ranks
    experts = tuple(range(first, first + expert_ranks))
    reductions: list[Meeting] = [(("reduction", layer), everyone) for layer in reversed(range(LAYERS))]
    meetings: list[Meeting] = []
    for index in range(num_run):
        mine = plan.ranks[rank]
        micro_batch = mine[index] if index < len(mine) else MicroBatch(())
        rings = [(shard.seq, shard.ring) for shard in micro_batch.shards if len(shard.ring) > 1]
        for way, layers in (("forward", range(LAYERS)), ("backward", reversed(range(LAYERS)))):
            for layer in layers:
                meetings += [((way, layer, seq), ring) for seq, ring in rings]
                if expert_ranks > 1:
                    meetings.append(((way, layer, index, first), experts))
                if overlaps and way == "backward" and index == num_run - 1:
                    meetings.append(reductions.pop(0))
    return meetings + reductions


def all_meet(plan: StepPlan, overlaps: Sequence[bool], expert_ranks: int = 1) -> bool:
    """Return whether all meetings of a step happen."""
    counts = micro_batch_counts(plan, expert_ranks)
    left = [meetings_of(rank, plan, counts[rank], expert_ranks, overlaps[rank])[::-1] for rank in range(plan.num_ranks)]
    moved = True
    while moved:
        moved = False
        for rank in range(plan.num_ranks):
            if not left[rank]:
                continue
            meeting = left[rank][-1]
            if all(left[other] and left[other][-1] == meeting for other in meeting[1]):
                moved = True
                for other in meeting[1]:
                    left[other].pop()
    return not any(left)


def verdicts(plan: StepPlan, expert_ranks: int = 1) -> list[bool]:
    return overlapping_ranks(plan, micro_batch_counts(plan, expert_ranks), expert_ranks).tolist()


def test_a_ring_that_is_not_the_last_of_a_partner_holds_reductions_back() -> None:
    rows = good_rows()
    assert verdicts(plan_of(rows)) == [False, False, True, True]  # ring 2 of three ranks; rank 2 has further work
    assert all_meet(plan_of(rows), verdicts(plan_of(rows)))
    assert not all_meet(plan_of(rows), [True] * 4)
    rows[2] = rows[2][:1]  # now the ring is the last of all its ranks
    rows[3] = rows[3][:1]
    without_seq_5 = plan_of(rows)
    assert verdicts(without_seq_5) == [True] * 4
    assert all_meet(without_seq_5, [True] * 4)


def test_one_partner_holds_back_all_ranks_that_are_coupled_to_it() -> None:
    """Ranks 1 and 2 share their last ring; rank 2 also shares one with rank 3, which has further work."""
    rows = [
        [[local(1, 0)]],
        [[member(0, (1, 2), 1)]],
        [[member(0, (1, 2), 2), member(2, (2, 3), 2)]],
        [[member(2, (2, 3), 3)], [local(3, 3)]],
    ]
    assert verdicts(plan_of(rows)) == [True, False, False, True]
    assert all_meet(plan_of(rows), verdicts(plan_of(rows)))
    assert not all_meet(plan_of(rows), [True, True, False, True])


def test_ranks_that_share_experts_hold_back_together() -> None:
    rows = [[[local(1, 0)]], [[member(0, (1, 2), 1)]], [[member(0, (1, 2), 2)], [local(3, 2)]], [[local(4, 3)]]]
    assert verdicts(plan_of(rows)) == [True, False, True, True]
    # Ranks 2 and 3 run a second micro-batch. Ranks 0 and 1 exchange tokens in their only one.
    assert verdicts(plan_of(rows), expert_ranks=2) == [False, False, True, True]
    assert all_meet(plan_of(rows), verdicts(plan_of(rows), 2), 2)
    assert not all_meet(plan_of(rows), [True, False, True, True], 2)


@pytest.mark.slow
@pytest.mark.parametrize(("balance", "expert_ranks"), [("none", 1), ("dp", 1), ("none", 2), ("pp", 2)])
def test_no_rank_waits_forever(balance: str, expert_ranks: int) -> None:
    """Without the rule some steps are stuck, except if every rank runs equally many micro-batches (pp)."""
    stage = StageCost(CostModel(a=1e-3, b=1.0), CostModel(a=1e-3, b=1.0))
    planner = HdpPlanner(Cluster(4, 64), (stage,), balance=balance, aligned=expert_ranks > 1)
    dice, stuck, held_back = random.Random(7), 0, 0
    for _ in range(100):
        lengths = [min(int(dice.paretovariate(0.7) * 8), 250) for _ in range(dice.randint(4, 16))]
        plan = planner(lengths)
        check_step_plan(plan, lengths)
        overlaps = verdicts(plan, expert_ranks)
        assert all_meet(plan, overlaps, expert_ranks)
        held_back += not all(overlaps)
        stuck += not all_meet(plan, [True] * plan.num_ranks, expert_ranks)
    assert stuck <= held_back < 100
    assert (stuck > 0) == (balance != "pp")


def test_steps_without_rings_and_without_work() -> None:
    assert verdicts(plan_of([[[local(1, 0)]], [], [], []])) == [True] * 4
