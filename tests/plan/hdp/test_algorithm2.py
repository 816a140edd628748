from __future__ import annotations

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.hdp.algorithm2 import _placing_order, place_algorithm2
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.sizes import Cluster
from tests.plan.hdp.problems import problem

COST = CostModel(a=1.0, b=1.0)


def placed(lengths: list[int], num_ranks: int, capacity: int, aligned: bool) -> PlacedRanks:
    sizes = np.array(lengths, dtype=np.int64)
    return place_algorithm2(problem(sizes, -(-sizes // capacity), Cluster(num_ranks, capacity), COST, aligned=aligned))


def test_a_small_plan_by_hand() -> None:
    # work of ranks: 20 tokens on 3 ranks 140, 12 on 2 ranks 78, 9 on 2 ranks 45, pack of 7 and 1: 58, pack of 6: 42
    result = placed([7, 20, 9, 6, 12, 1], 4, 8, aligned=False)
    # seq 1 on 0-2; seq 4: windows 0-1, 1-2 and 2-3 are ready at 140, the last has the least total; then seq 2 on 0-1
    # (140 against 218); the packs to rank 0 and 1 (185 each): 243 and 227
    assert result.widths.tolist() == [1, 3, 2, 1, 2, 1]
    assert result.first_ranks.tolist() == [0, 0, 0, 1, 2, 0]
    assert [[[shard.seq for shard in mb.shards] for mb in rank] for rank in result] == [
        [[1], [2], [0, 5]],
        [[1], [2], [3]],
        [[1], [4]],
        [[4]],
    ]


def test_aligned_packs_fill_the_holes_of_rings() -> None:
    result = placed([7, 20, 9, 6, 12, 1], 4, 8, aligned=True)
    slots = dict(enumerate(result.orders.tolist()))
    assert slots[0] == slots[5]
    for rank in result:
        assert all(micro_batch.shards for micro_batch in rank[-1:])


def test_buckets_have_equal_work() -> None:
    work = np.array([8.0, 4, 4, 2, 2, 2, 2, *[1.0] * 8, *[0.5] * 16])
    assert list(_placing_order(work, in_turn=False)) == list(range(len(work)))
    turns = list(_placing_order(work, in_turn=True))
    assert sorted(turns) == list(range(len(work)))
    assert turns[0] == 0
    assert turns[1] == 1
    assert turns != list(range(len(work)))
    assert list(_placing_order(np.zeros(0), in_turn=True)) == []
