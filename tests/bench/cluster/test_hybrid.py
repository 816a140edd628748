"""Megatron's hybrid plan as our plan: the same groups in the same order, with a barrier between groups."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bytescale_ext.parallel.p2p import RingComm
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.sizes import Cluster
from megatron.bytescale.cli.shared.megatron_hybrid import hybrid_groups
from scripts.bench.cluster.hybrid import HybridPlanner, group_numbers, groups_of_rank, place_groups, with_barriers
from tests.bytescale.runtimes import runtime_of

LENGTHS = [*np.random.default_rng(3).integers(100, 2048, 40).tolist(), 16000, 9000, 5000, 3000]
PLANNER = HybridPlanner(Cluster(8, 2048))


def test_the_plan_holds_megatrons_groups_in_their_order() -> None:
    plan = PLANNER(LENGTHS)
    check_step_plan(plan, LENGTHS)
    groups = hybrid_groups(LENGTHS, PLANNER.cluster)
    assert len(groups) > 1
    for rank, micro_batches in enumerate(plan.ranks):
        assert [[shard.seq for shard in batch.shards] for batch in micro_batches] == [
            [seq] for group in groups for seq in group[rank]
        ]
        ranks = plan.ranks
        assert isinstance(ranks, PlacedRanks)
        assert groups_of_rank(ranks, rank).tolist() == [
            number for number, group in enumerate(groups) for _ in group[rank]
        ]
    assert sorted(seq for group in groups for seq in {seq for seqs in group for seq in seqs}) == list(range(44))


def test_the_planner_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(PLANNER)) == PLANNER
    assert PLANNER.fallback(LENGTHS) == PLANNER(LENGTHS)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[[0], []]], "rank 1 has no sequence in group 0"),
        ([[[0], [1], [0]]], "sequence 0 is not at one place of contiguous ranks"),
        ([[[0, 1], [1, 0]]], "sequence 1 is not at one place"),
    ],
)
def test_groups_that_no_plan_can_hold_are_refused(groups: list[list[list[int]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place_groups(groups, [5, 5])


def test_a_barrier_before_each_group_except_the_first() -> None:
    events: list[Any] = []
    placed = place_groups([[[0, 1], [2]], [[3], [3]], [[4], [5]]], [5] * 6)
    runtime: Any = runtime_of(comm=RingComm(None, 0, 2))
    forward = with_barriers(lambda data, model: events.append(data), runtime, lambda: events.append("barrier"))
    for _ in range(2):
        runtime.step.batch = SimpleNamespace(plan=SimpleNamespace(ranks=placed))
        for seq in (0, 1, 3, 4):
            forward(seq, None)
    assert events == [0, 1, "barrier", 3, "barrier", 4] * 2
    assert group_numbers(placed).tolist() == [0, 0, 0, 1, 2, 2]
