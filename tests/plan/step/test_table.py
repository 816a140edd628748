from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
from bytescale_ext.plan.step.placed import PlacedRanks, _sorting_order
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.table import shards_of_rank, table_of
from tests.sample import seeds


def random_placed(random: np.random.Generator) -> PlacedRanks:
    num_ranks, count = int(random.integers(1, 12)), int(random.integers(0, 40))
    widths = random.integers(1, num_ranks + 1, count) if random.random() < 0.7 else np.ones(count, dtype=np.int64)
    firsts = np.array([random.integers(0, num_ranks - width + 1) for width in widths], dtype=np.int64)
    lengths = widths + random.integers(0, 50, count)
    offloads = random.random(count) if random.random() < 0.5 else None
    orders = random.integers(0, 9, count)
    inner_rings = np.gcd(widths, random.integers(1, 5, count)) if random.random() < 0.5 else None
    shares = {}
    for seq in np.flatnonzero((widths > 1) & (random.random(count) < 0.3)).tolist():
        parts = 1 + random.multinomial(lengths[seq] - widths[seq], np.ones(widths[seq]) / widths[seq])
        shares[seq] = tuple(parts.tolist())
    forms = (offloads, inner_rings, shares)
    return PlacedRanks(num_ranks, lengths, firsts, widths, orders, bool(random.integers(2)), *forms)


@pytest.mark.parametrize("seed", seeds(60))
def test_the_table_of_arrays_is_that_of_their_micro_batches(seed: int) -> None:
    placed = random_placed(np.random.default_rng(seed))
    made = table_of(tuple(placed))
    assert made is not placed.table
    for field in dataclasses.fields(made):
        one, other = getattr(placed.table, field.name), getattr(made, field.name)
        assert one == other if isinstance(one, dict) else np.array_equal(one, other), field.name


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("as_arrays", [True, False])
def test_figures_of_a_rank_are_those_of_its_micro_batches(seed: int, as_arrays: bool) -> None:
    placed = random_placed(np.random.default_rng(seed))
    ranks = placed if as_arrays else tuple(placed)
    cost, lengths = CostModel(a=0.3, b=2.0, c=1.0, g=7.0, h=0.1), tuple(placed.lengths.tolist())
    for rank, mine in enumerate(placed):
        found = shards_of_rank(ranks, rank)
        assert found.num_micro_batches == len(mine)
        assert found.num_filled == sum(bool(one.shards) for one in mine)
        assert found.tokens.sum() == sum(one.num_tokens for one in mine)
        expected = sum(cost.micro_batch_cost(one, lengths) for one in mine)
        assert cost.rank_cost(found, lengths) == pytest.approx(expected, rel=1e-12)


def test_the_digest_sees_rings_that_are_no_runs_and_empty_micro_batches() -> None:
    def digest(ring: tuple[int, ...], *more: MicroBatch) -> str:
        return StepPlan(4, 8, (4,), ((MicroBatch((Shard(0, ((0, 4),), ring),)), *more), (), (), ())).digest()

    empty = MicroBatch(())
    digests = [digest(ring) for ring in ((0,), (), (0, 2), (0, 3), (2, 0), (0, 1))]
    digests += [digest((0,), empty), digest((0,), empty, empty)]
    assert len(set(digests)) == len(digests)


def test_one_key_sorts_as_many_do() -> None:
    random = np.random.default_rng(0)
    keys = [random.integers(0, 5, 200) for _ in range(4)]
    wanted = np.lexsort(keys[::-1])
    assert _sorting_order(*keys).tolist() == wanted.tolist()
    far = [key + (key == 4) * 2**40 for key in keys]  # a single number would overflow
    assert _sorting_order(*far).tolist() == wanted.tolist()
    assert _sorting_order(np.zeros(0, dtype=np.int64)).tolist() == []
