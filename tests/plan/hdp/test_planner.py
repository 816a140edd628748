"""Planner as users call it: every kind of balance on random steps, checked by independent validators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bytescale_ext.errors import OutOfTime
from bytescale_ext.plan.activation.offload import OffloadLimits
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.exact import brute_force
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.evaluate.replay import replay, replay_stages
from bytescale_ext.plan.hdp.aligned import search as pipelines
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.table import PLANNERS, planner_names
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster, Slicing
from tests.sample import sampled

FORWARD = CostModel(a=4.17e-8, b=1.6e-3, c=1.83e-4, g=0.1)
BACKWARD = CostModel(a=2.5 * 4.17e-8, b=3.2e-3, c=3.66e-4, g=0.2)
STAGE = StageCost(FORWARD, BACKWARD)
KINDS: tuple[dict[str, Any], ...] = (
    *({"balance": row.name} for row in PLANNERS),
    *({"balance": row.name, "num_stages": 3} for row in PLANNERS if row.aligned),
    *({"balance": row.name, "num_stages": 3, "num_slices": 3} for row in PLANNERS if row.sliced),
)

BY_TIME: tuple[dict[str, Any], ...] = ({"balance": "dp"}, {"balance": "pp", "num_stages": 2})


def varied(planner: HdpPlanner, num_stages: int = 1, num_slices: int = 1, **changes: Any) -> HdpPlanner:
    """Return the planner with this number of equal stages and slices, and other changes."""
    return replace(planner, stages=planner.stages[:1] * num_stages, slicing=Slicing(num_slices), **changes)


def placed_of(plan: StepPlan) -> PlacedRanks:
    assert isinstance(plan.ranks, PlacedRanks)
    return plan.ranks


def random_steps(seed: int, count: int) -> Iterator[tuple[HdpPlanner, list[int]]]:
    """Return planners (kind none) with random costs, some of them unlike any hardware, and lengths that fit."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        num_ranks, multiple = int(random.integers(1, 20)), int(random.choice([1, 2, 4]))
        capacity = multiple * int(random.integers(1, 40))
        most = num_ranks * capacity
        lengths = [
            random.integers(1, most + 1, random.integers(0, 20)),
            np.ceil(np.exp(random.random(random.integers(0, 50)) * np.log(most))).astype(np.int64),
            random.integers(1, capacity + 1, random.integers(0, 60)),
        ][random.integers(3)]
        a, b, c, g = 10.0 ** random.uniform(-4, 1, 4) * (1, 1, random.integers(2), random.integers(2))
        forward = CostModel(a=a / 10, b=b, c=c, g=g)
        node = int(random.integers(1, num_ranks + 3)) if random.integers(2) else None
        planner = HdpPlanner(
            Cluster(num_ranks, capacity, node),
            (StageCost(forward, forward.scaled(2.2)),),
            tokens_multiple=multiple,
            balance="none",
        )
        yield planner, np.minimum(lengths, most).tolist()


@pytest.fixture
def few_arrangements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the planner with a short search, to plan more steps in the same time."""
    monkeypatch.setattr(pipelines, "_MAX_ARRANGEMENTS", 4)


@pytest.mark.slow
@pytest.mark.usefixtures("few_arrangements")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_plans_keep_every_law_and_run(kind: dict[str, Any]) -> None:
    for base, lengths in random_steps(1, 20 if kind["balance"] in ("dp", "pp") else 60):
        planner = varied(base, **kind)
        plan = planner(lengths)
        assert planner.needs_aligned <= plan.aligned <= planner.row.aligned
        check_step_plan(plan, lengths, planner.tokens_multiple)
        if plan.aligned:
            replay_stages(plan, planner.stages)
        else:
            replay(plan, planner.stages[0].both)


@pytest.mark.slow
@pytest.mark.usefixtures("few_arrangements")
@pytest.mark.parametrize("kind", sampled(BY_TIME, BY_TIME[:1]), ids=str)
def test_small_rings_stay_inside_a_node(kind: dict[str, Any]) -> None:
    num_narrow = 0
    for base, lengths in random_steps(2, 60):
        node = base.cluster.ranks_per_node
        if node is None:
            continue
        placed = placed_of(varied(base, **kind)(lengths))
        narrow = placed.widths <= node
        first, last = placed.first_ranks, placed.first_ranks + placed.widths - 1
        assert (first[narrow] // node == last[narrow] // node).all()
        assert (first[~narrow] % node == 0).all()
        num_narrow += int((narrow & (placed.widths > 1)).sum())
    assert num_narrow > 50


@pytest.mark.slow
@pytest.mark.usefixtures("few_arrangements")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_offload_shares_are_the_least_that_fit(kind: dict[str, Any]) -> None:
    random = np.random.default_rng(3)
    num_offloaded = 0
    refused = []
    for base, lengths in random_steps(4, 25):
        layers = int(random.integers(1, 20))
        limits = OffloadLimits(layers, 1.0, 10.0 ** random.uniform(0, 4), 10.0 ** random.uniform(0, 4))
        planner = varied(base, offload=limits, **kind)
        longer = [2 * length for length in lengths]
        try:
            plan = planner(longer)
        except ValueError as error:
            refused.append(str(error))
            continue
        check_step_plan(plan, longer, planner.tokens_multiple, layers)
        shares = placed_of(plan).table.offloads
        num_offloaded += int((shares > 0).sum())
        if (shares > 1e-6).any():
            less = StepPlan(
                plan.num_ranks,
                plan.tokens_per_rank,
                plan.lengths,
                replace(placed_of(plan), offloads=(placed_of(plan).offloads - 1e-6).clip(0)),  # type: ignore[operator]
                plan.aligned,
            )
            with pytest.raises(ValueError, match="stay on the device, more than C"):
                check_step_plan(less, longer, planner.tokens_multiple, layers)
        hidden = limits.hidden_shares(np.array(longer, dtype=np.float64), planner.stages[-1].forward)
        used = placed_of(plan).offloads
        assert used is not None
        assert (used <= hidden + 1e-9).all()
        tokens = -(-placed_of(plan).lengths // placed_of(plan).widths)
        host = used * max(layers - 2, 0) * tokens
        assert (host <= limits.host_bytes / len(planner.stages) + planner.tokens_multiple * layers).all()
    assert num_offloaded > 20
    assert refused
    assert all("with offloading; raise the tokens per rank" in text for text in refused)


def test_offloading_is_a_lower_limit_and_not_the_choice() -> None:
    """A giant sequence is among short sequences.

    With a share of 1 it would be on two ranks, which is extremely slow.
    """
    lengths = [64 * 8192, *[2000] * 2000]
    limits = OffloadLimits(32, 139_000.0, 1e12, 1e12)
    slow = StageCost(FORWARD, BACKWARD)
    plan = HdpPlanner(Cluster(64, 8192), (slow,), offload=limits)(lengths)
    assert 32 <= placed_of(plan).widths[0] <= 64
    without = HdpPlanner(Cluster(64, 8192), (slow,))(lengths)
    assert replay(plan, slow.both).makespan <= 1.001 * replay(without, slow.both).makespan


@pytest.mark.parametrize(("name", "context", "num_ranks"), [("github", 1 << 18, 64), ("byted", 1 << 20, 128)])
def test_dp_is_near_the_lower_bound(name: str, context: int, num_ranks: int) -> None:
    for seed in range(5):
        lengths = sample_lengths(name, context, num_ranks << 16, seed).tolist()
        plan = HdpPlanner(Cluster(num_ranks, 8192, 8), (STAGE,))(lengths)
        check_step_plan(plan, lengths)
        bound = lower_bounds(lengths, Cluster(num_ranks, 8192), [STAGE]).largest
        assert bound <= replay(plan, STAGE.both).makespan <= 1.01 * bound


@pytest.mark.slow
def test_pp_beats_algorithm_2_with_pipelines() -> None:
    lengths = sample_lengths("github", 1 << 18, 64 << 16, 0).tolist()
    planner = HdpPlanner(Cluster(64, 8192, 8), (STAGE,) * 4, balance="pp")
    ours, theirs = (
        replay_stages(one(lengths), [STAGE] * 4) for one in (planner, replace(planner, balance="bytescale"))
    )
    assert ours.makespan < 0.85 * theirs.makespan
    assert ours.makespan < 1.7 * lower_bounds(lengths, Cluster(64, 8192), [STAGE] * 4).largest


@pytest.mark.slow
@pytest.mark.usefixtures("few_arrangements")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_plans_do_not_change_with_the_type_of_the_lengths(kind: dict[str, Any]) -> None:
    lengths = np.random.default_rng(5).integers(1, 3000, 60)
    planner = varied(HdpPlanner(Cluster(8, 1024), (STAGE,), tokens_multiple=8), **kind)
    plan = planner(lengths.tolist())
    assert planner(lengths.astype(np.int32)).digest() == plan.digest()  # type: ignore[arg-type]
    assert StepPlan.from_json(plan.to_json()).digest() == plan.digest()


@pytest.mark.slow
def test_plans_do_not_change_unnoticed() -> None:
    lengths = np.random.default_rng(7).integers(1, 6000, 300).tolist()
    base = HdpPlanner(Cluster(16, 2048), (STAGE,))
    assert [varied(base, **kind)(lengths).digest() for kind, _ in DIGESTS] == [digest for _, digest in DIGESTS]


DIGESTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"balance": "none"}, "869c8a701c13e21d"),
    ({"balance": "none", "aligned": True}, "de167dd1e2291c0a"),
    ({"balance": "bytescale"}, "b5b5502584d570cf"),
    ({"balance": "bytescale", "num_stages": 3}, "81ae3ac8f52ea5b0"),
    ({"balance": "dp"}, "f8b1c41e2b901460"),
    ({"balance": "pp"}, "5f4d0e99841bb326"),
    ({"balance": "pp", "num_stages": 4}, "5c385dbcceb6b8c4"),
    ({"balance": "pp", "num_stages": 3, "num_slices": 3}, "0ffce3261234d13a"),
)


@pytest.mark.slow
@pytest.mark.parametrize("balance", planner_names())
def test_a_planner_stops_when_it_is_told(balance: str) -> None:
    lengths = np.random.default_rng(5).integers(1, 3000, 60).tolist()
    planner = HdpPlanner(Cluster(8, 1024), (STAGE,), tokens_multiple=8, balance=balance)
    if balance == "none":  # the simple plan is quick, and never stops
        assert planner(lengths, lambda: True) == planner.fallback(lengths)
    else:
        with pytest.raises(OutOfTime):
            planner(lengths, lambda: True)
    check_step_plan(planner.fallback(lengths), lengths, 8)
    assert planner(lengths, lambda: False) == planner(lengths)


def test_the_fallback_has_aligned_slots_where_they_are_needed() -> None:
    lengths = [30, 7, 55, 8, 8, 2, 19, 33]
    plan = HdpPlanner(Cluster(6, 10), (STAGE,) * 2, balance="pp").fallback(lengths)
    assert plan.aligned
    check_step_plan(plan, lengths)
    assert not HdpPlanner(Cluster(6, 10), (STAGE,)).fallback(lengths).aligned


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"balance": "best"}, "balance 'best' is unknown; choose one of none, dp, pp, bytescale"),
        ({"balance": "static"}, "balance 'static' is unknown"),
        ({"stages": ()}, "0 stages"),
        ({"aligned": True}, "dp makes no aligned slots.*choose pp"),
        ({"stages": (STAGE, STAGE)}, "dp makes no aligned slots.*choose pp"),
    ],
)
def test_bad_settings_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(HdpPlanner(Cluster(4, 20), (STAGE,)), **change)


def test_a_sequence_that_no_width_holds_is_named() -> None:
    planner = HdpPlanner(Cluster(4, 20), (STAGE,), tokens_multiple=4)
    with pytest.raises(ValueError, match=r"sequence 1 has 81 tokens, more than 4 ranks of 20 .* at least 24, or cut"):
        planner([5, 81, 3])
    tight = replace(planner, offload=OffloadLimits(10, 1.0, 1e9, host_bytes=20.0))  # host memory takes two tokens
    with pytest.raises(ValueError, match=r"hold, 20 with offloading; .* at least 28 \(28 without offloading\)"):
        tight([5, 100, 3])
    wide = replace(planner, offload=OffloadLimits(10, 1.0, 1e9, host_bytes=1e9))
    check_step_plan(wide([5, 100, 3]), [5, 100, 3], 4, num_layers=10)
    with pytest.raises(ValueError, match=r"hold, 100 with offloading; .* at least 40 \(200 without offloading\)"):
        wide([5, 800, 3])


@pytest.mark.full
@pytest.mark.slow
def test_small_steps_are_near_the_true_optimum() -> None:
    random = np.random.default_rng(0)
    cost = CostModel(a=1e-3, b=0.1, c=0.02)
    stage = StageCost(cost.scaled(0.25), cost.scaled(0.75))
    ratios = []
    for _ in range(8):
        num_ranks = int(random.integers(2, 5))
        lengths = (
            np.exp(random.uniform(np.log(10), np.log(100 * num_ranks), random.integers(3, 7))).astype(int).tolist()
        )
        plan = HdpPlanner(Cluster(num_ranks, 100), (stage,))(lengths)
        check_step_plan(plan, lengths)
        ratios.append(replay(plan, cost).makespan / brute_force(lengths, Cluster(num_ranks, 100), cost))
    assert min(ratios) >= 0.999
    assert np.mean(ratios) <= 1.04
    assert max(ratios) <= 1.15


@pytest.mark.parametrize("kind", [{"balance": "dp"}, {"balance": "pp", "num_stages": 4}])
@pytest.mark.slow
def test_windows_change_plans(kind: dict[str, Any]) -> None:
    """If layers have windows, a plan for windows is faster than a plan for full attention."""
    limited = StageCost(*(replace(one, window=1024, window_share=1.0) for one in (FORWARD, BACKWARD)))
    lengths = [131072, *[8192] * 32, *[1000] * 200]
    planners = [varied(HdpPlanner(Cluster(64, 8192, 8), (stage,)), **kind) for stage in (STAGE, limited)]
    plans = [planner(lengths) for planner in planners]
    check_step_plan(plans[1])
    assert placed_of(plans[0]).widths.tolist() != placed_of(plans[1]).widths.tolist()
    full, windows = (replay_stages(plan, planners[1].stages).makespan for plan in plans)
    assert windows < full
    assert windows < replay_stages(plans[0], planners[0].stages).makespan


def slot_seconds(plan: StepPlan, stage: StageCost) -> float:
    """Return the time of a step if all ranks wait for the slowest rank in each slot."""
    slots = max(map(len, plan.ranks))
    costs = [[stage.both.micro_batch_cost(one, plan.lengths) for one in rank] for rank in plan.ranks]
    return sum(max(cost[slot] for cost in costs if slot < len(cost)) for slot in range(slots))


@pytest.mark.slow
def test_plans_follow_the_load_of_experts() -> None:
    """Uneven experts raise the cost of tokens relative to attention. Each of two plans is faster at its own load."""
    planner = HdpPlanner(Cluster(4, 4096), (STAGE,), balance="pp", aligned=True, expert_share=0.8)
    loaded = planner.with_expert_imbalance(3.0)
    (stage,) = loaded.stages
    assert stage.forward.b == pytest.approx(STAGE.forward.b * (0.2 + 0.8 * 3.0))
    ratios = []
    for seed in (24, 32, 36):
        tokens = np.exp(np.random.default_rng(seed).random(24) * np.log(4 * 4096 * 0.9))
        lengths = np.ceil(tokens).astype(int).tolist()
        even, uneven = planner(lengths), loaded(lengths)
        for plan in (even, uneven):
            check_step_plan(plan)
        assert even.digest() != uneven.digest() == planner.with_expert_imbalance(3.0)(lengths).digest()
        ratios.append([slot_seconds(uneven, one) / slot_seconds(even, one) for one in (stage, STAGE)])
    at_load, at_even_load = np.array(ratios).T
    assert (at_load < 0.995).all()
    assert (at_even_load > 1.005).all()
