"""The cost model counts the tokens that a token-by-token dispatch computes, sends and receives on each rank."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.experts.cost import ExpertCost, rank_seconds
from bytescale_ext.plan.experts.eplb import packed
from bytescale_ext.plan.experts.flexmoe import follow
from bytescale_ext.plan.experts.placement import PlacementPlan, homes_of, tokens_of_ranks
from tests.plan.experts.tokens import destinations

EXPERTS, RANKS, SLOTS = 6, 3, 4
COST = ExpertCost(1.0, 1e-3, 0.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["static", "flexmoe", "eplb"])
def test_tokens_one_by_one(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    loads = rng.multinomial(200, rng.dirichlet([0.5] * EXPERTS), size=RANKS)
    plan = PlacementPlan.static(EXPERTS, RANKS, SLOTS)
    if name != "static":
        plan = packed(plan, loads) if name == "eplb" else follow(plan, loads, COST, 1.05)
    now = rng.multinomial(150, rng.dirichlet([0.5] * EXPERTS), size=RANKS)  # loads after the plan have changed
    tokens = tokens_of_ranks(plan.parts(), now.sum(0))
    sent, received = np.zeros(RANKS), np.zeros(RANKS)
    computed = np.zeros((RANKS, EXPERTS), np.int64)
    for (source, expert), ranks in destinations(plan, now).items():
        assert len(ranks) == now[source, expert]
        for rank in ranks:
            computed[rank, expert] += 1
            if rank != source:
                sent[source] += 1
                received[rank] += 1
    assert (computed == tokens).all()
    held = (plan.parts() > 0) & ~homes_of(EXPERTS, RANKS)
    expected = computed.sum(1) + 4e-3 * np.maximum(sent, received)
    assert rank_seconds(tokens, held, now, COST) == pytest.approx(expected)


def test_own_tokens_come_first() -> None:
    plan = PlacementPlan.of(np.array([[1024, 256], [0, 768]]), 2)
    loads = np.array([[0, 10], [4, 10]])  # rank 0 computes 5 of its own tokens for expert 1, and rank 1 the others
    found = destinations(plan, loads)
    assert found[0, 1] == [0] * 5 + [1] * 5
    assert found[1, 1] == [1] * 10
    assert found[1, 0] == [0] * 4


def test_a_rank_without_tokens_of_its_own_takes_those_of_others() -> None:
    plan = PlacementPlan.of(np.array([[1024, 512], [0, 512]]), 2)
    assert destinations(plan, np.array([[0, 0], [0, 8]]))[1, 1] == [1] * 4 + [0] * 4
