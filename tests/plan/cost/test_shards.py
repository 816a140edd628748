"""Sums over arrays against sums over single micro-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.step.check import groups_of
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from tests.plan.hdp.aligned.random_plans import random_plan

COST = CostModel(a=0.013, b=1.1, c=0.9, g=2.5, h=0.3)
SEEDS = range(12)


def plan_of(seed: int) -> StepPlan:
    return random_plan(np.random.default_rng(seed), 2 + seed % 7, 6, aligned=bool(seed % 2))


def rows_of(plan: StepPlan) -> list[MicroBatch]:
    return [micro_batch for rank in plan.ranks for micro_batch in rank]


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_and_costs_are_those_of_each_micro_batch(seed: int) -> None:
    plan = plan_of(seed)
    table = ShardTable.of(plan)
    assert table.num_rows == len(rows_of(plan))
    assert table.num_ranks == plan.num_ranks
    assert table.row_tokens.tolist() == [row.num_tokens for row in rows_of(plan)]
    costs = [COST.micro_batch_cost(row, plan.lengths) for row in rows_of(plan)]
    np.testing.assert_allclose(table.row_costs(COST), costs)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_exposed_is_what_an_exchange_adds(seed: int) -> None:
    plan = plan_of(seed)
    table = ShardTable.of(plan)
    free = replace(COST, c=0.0)
    np.testing.assert_allclose(table.row_exposed(COST), table.row_costs(COST) - table.row_costs(free), atol=1e-9)
    assert not table.row_exposed(free).any()


@pytest.mark.parametrize("seed", SEEDS)
def test_coupled_groups_are_joined_by_rings(seed: int) -> None:
    """Groups equal groups that are joined ring by ring, up to their numbers."""
    plan = plan_of(seed)
    rows = rows_of(plan)
    group = list(range(len(rows)))
    for seq in range(len(plan.lengths)):
        members = [number for number, row in enumerate(rows) if any(shard.seq == seq for shard in row.shards)]
        joined = {group[number] for number in members}
        group = [min(joined) if one in joined else one for one in group]
    found = ShardTable.of(plan).row_groups.tolist()
    pairs = set(zip(group, found, strict=True))
    assert len(pairs) == len(set(group)) == len(set(found))
    assert [number for rank in groups_of(plan) for number in rank] == found


@pytest.mark.parametrize("seed", SEEDS)
def test_micro_batches_coupled_with_a_rank(seed: int) -> None:
    """They are the micro-batches of the rank's coupled groups, with the same shards and costs in the same order."""
    plan = plan_of(seed)
    table = ShardTable.of(plan)
    for rank in range(plan.num_ranks):
        groups = table.row_groups
        rows = np.flatnonzero(np.isin(groups, groups[table.row_ranks == rank]))
        few = table.only_coupled_with(rank)
        assert few.row_ranks.tolist() == table.row_ranks[rows].tolist()
        assert few.counts[rank] == table.counts[rank]
        assert few.row_tokens.tolist() == table.row_tokens[rows].tolist()
        np.testing.assert_array_equal(few.row_costs(COST), table.row_costs(COST)[rows])
        assert len(set(few.row_groups.tolist())) == len(set(groups[rows].tolist()))


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_know_their_rank(seed: int) -> None:
    plan = plan_of(seed)
    table = ShardTable.of(plan)
    assert table.row_ranks.tolist() == [rank for rank, row in enumerate(plan.ranks) for _ in row]
    assert table.offsets.tolist() == [sum(map(len, plan.ranks[:rank])) for rank in range(plan.num_ranks)]
    for row, seq, member in zip(table.rows.tolist(), table.seqs.tolist(), table.members.tolist(), strict=True):
        shard = next(one for one in rows_of(plan)[row].shards if one.seq == seq)
        assert shard.ring[member] == table.row_ranks[row]


@pytest.mark.parametrize("seed", SEEDS)
def test_padded_ranks_keep_their_micro_batches(seed: int) -> None:
    plan = plan_of(seed)
    table = ShardTable.of(plan)
    counts = table.counts + np.arange(plan.num_ranks) % 3
    padded = StepPlan(
        plan.num_ranks,
        plan.tokens_per_rank,
        plan.lengths,
        tuple((*row, *[MicroBatch(())] * (rank % 3)) for rank, row in enumerate(plan.ranks)),
        plan.aligned,
    )
    longer, made = table.with_counts(counts), ShardTable.of(padded)
    assert longer.row_tokens.tolist() == made.row_tokens.tolist()
    np.testing.assert_allclose(longer.row_costs(COST), made.row_costs(COST))
    assert len(set(longer.row_groups.tolist())) == len(set(table.row_groups.tolist())) + counts.sum() - table.num_rows


def test_rings_in_any_order_of_ranks() -> None:
    """In a ring with descending ranks, members are positions in the ring, not ranks."""
    shards = [MicroBatch((Shard(0, ranges, (1, 0)),)) for ranges in (((1, 3),), ((0, 1), (3, 4)))]
    table = ShardTable.of(StepPlan(2, 8, (4,), tuple((one,) for one in shards)))
    assert table.members.tolist() == [1, 0]
    assert table.widths.tolist() == [2, 2]
    assert table.row_groups.tolist() == [0, 0]
    assert table.row_tokens.tolist() == [2, 2]


def test_a_plan_of_nothing_is_an_empty_table() -> None:
    table = ShardTable.of(StepPlan(3, 8, (), ((), (), ())))
    assert (table.num_rows, table.row_costs(COST).tolist(), table.row_groups.tolist()) == (0, [], [])
    assert table.distinct_peers().tolist() == [0, 0, 0]


@pytest.mark.parametrize(("first", "width", "inner_rings"), [(0, 8, 1), (0, 8, 2), (0, 12, 3), (2, 4, 2), (4, 3, 1)])
def test_peers_and_messages_between_nodes_are_those_of_the_route(first: int, width: int, inner_rings: int) -> None:
    """Every rank sends D - 1 shares of its ring's keys, counted step by step on nodes of 4."""
    columns = (np.array([number]) for number in (64, first, width, 0))
    placed = PlacedRanks(16, *columns, inner_rings=np.array([inner_rings]))
    table = ShardTable.of(StepPlan(16, 64, (64,), placed))
    peers, shares = [0] * 16, []
    for index in range(width):
        route = Route(tuple(range(first, first + width)), index, inner_rings)
        sent = {route.next_rank: width - inner_rings, route.next_counterpart: inner_rings - 1}
        mine = route.ring[index]
        shares.append(sum(number for rank, number in sent.items() if rank // 4 != mine // 4) / (width - 1))
        others = {route.next_rank, route.previous_rank, route.next_counterpart, route.previous_counterpart}
        peers[mine] = len(others - {mine})
    assert table.distinct_peers().tolist() == peers
    assert table.sent_to_other_nodes(4).tolist() == pytest.approx(shares)
