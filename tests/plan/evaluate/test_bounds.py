from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.exact import brute_force
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster, Slicing
from tests.plan.hdp.aligned.random_plans import TOKENS_PER_RANK, random_plan
from tests.plan.simple_plans import plan_naive
from tests.sample import examples

NOTHING = CostModel(a=0.0, b=0.0)
STAGE = StageCost(CostModel(a=0.01, b=1.0, c=0.3, g=2.0), CostModel(a=0.025, b=2.0, c=0.6, g=3.0))
HEAD = StageCost(CostModel(a=0.01, b=1.5, c=0.3, g=2.0), CostModel(a=0.025, b=3.0, c=0.6, g=3.0))


def forward_only(a: float = 0.0, b: float = 0.0, c: float = 0.0, g: float = 0.0) -> list[StageCost]:
    return [StageCost(CostModel(a=a, b=b, c=c, g=g), NOTHING)]


def test_each_bound_by_hand() -> None:
    work = lower_bounds([6, 2, 4], Cluster(2, 10), forward_only(a=1.0, b=2.0, g=3.0))
    assert work.work == (36 + 4 + 16 + 24 + 3 * 2) / 2  # 12 tokens need 2 micro-batches
    assert work.area == work.work
    assert work.longest == 18 + 6 + 3  # 6 tokens on both ranks
    assert work.capacity == 2 * 6 + 3
    assert work.giants == 0
    assert work.largest == 43


def test_what_no_plan_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="1 sequences of up to 81 tokens on 4 ranks"):
        lower_bounds([81], Cluster(4, 20), [STAGE])
    with pytest.raises(ValueError, match="0 sequences"):
        lower_bounds([], Cluster(4, 20), [STAGE])


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=5), st.integers(1, 3), st.sampled_from([0.0, 0.4, 3.0]))
def test_no_schedule_is_faster(lengths: list[int], num_ranks: int, c: float) -> None:
    lengths = [min(length, num_ranks * 8) for length in lengths]
    costs = forward_only(a=0.05, b=1.0, c=c)
    best = brute_force(lengths, Cluster(num_ranks, 8), costs[0].forward)
    bounds = lower_bounds(lengths, Cluster(num_ranks, 8), costs)
    assert bounds.largest <= best * (1 + 1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(1, 120), min_size=1, max_size=40), st.integers(12, 16))
def test_no_naive_plan_is_faster(lengths: list[int], num_ranks: int) -> None:
    makespan = replay_stages(plan_naive(lengths, num_ranks, 10), [STAGE]).makespan
    assert lower_bounds(lengths, Cluster(num_ranks, 10), [STAGE]).largest <= makespan * (1 + 1e-9)


@pytest.mark.full
@pytest.mark.slow
def test_no_plan_with_pipelines_is_faster() -> None:
    random = np.random.default_rng(5)
    tightest: dict[int, float] = {}
    for _ in range(150):
        plan = random_plan(random, int(random.integers(1, 6)), int(random.integers(1, 9)))
        if not plan.lengths:
            continue
        stages = [STAGE] * int(random.integers(0, 4)) + [HEAD]
        for num_slices in (1, int(random.choice([2, 3, 6]))):
            makespan = replay_stages(plan, stages, Slicing(num_slices)).makespan
            bounds = lower_bounds(plan.lengths, Cluster(plan.num_ranks, TOKENS_PER_RANK), stages, Slicing(num_slices))
            assert bounds.largest <= makespan * (1 + 1e-9)
            tightest[num_slices] = min(tightest.get(num_slices, np.inf), makespan / bounds.largest)
    assert tightest[1] == pytest.approx(1.0)  # the bound of a single micro-batch is exact
    assert max(tightest.values()) < 1.1


@pytest.mark.parametrize(("num_ranks", "tokens"), [(1, 8), (3, 24)])
def test_one_sequence_in_slices_takes_the_longest_way(num_ranks: int, tokens: int) -> None:
    """The sequence needs all ranks. Its slices run one after another, down the stages and up again."""
    zigzag = tuple((MicroBatch((Shard(0, zigzag_ranges(tokens, num_ranks, rank), tuple(range(num_ranks))),)),)
                   for rank in range(num_ranks))  # fmt: skip
    plan = StepPlan(num_ranks, 8, (tokens,), zigzag, aligned=True)
    for stages in ([STAGE], [STAGE, STAGE, HEAD]):
        for num_slices in (1, 2, 4):
            makespan = replay_stages(plan, stages, Slicing(num_slices)).makespan
            bounds = lower_bounds([tokens], Cluster(num_ranks, 8), stages, Slicing(num_slices))
            assert bounds.longest == pytest.approx(makespan, rel=0.02)  # shards of whole tokens in the replay
            assert bounds.largest == bounds.longest


def test_slices_have_launches_and_exchanges_of_their_own() -> None:
    one, two = (
        lower_bounds([30, 2], Cluster(4, 10), forward_only(a=0.01, b=1.0, c=5.0, g=1.0), Slicing(k)) for k in (1, 2)
    )
    assert two.work - one.work == pytest.approx(4 / 4)  # 32 tokens are 4 micro-batches, with twice the launches
    assert two.capacity - one.capacity == 1
    assert two.area > one.area + 1
