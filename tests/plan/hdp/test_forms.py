"""Form of rings: chosen by the cost of links between nodes, accepted by the check, and counted by the replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.nodes import Nodes
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.replay import replay, replay_stages
from bytescale_ext.plan.hdp.forms import with_ring_forms
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.table import planner_names
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster

NODES = Nodes(4, 5.0)
ONE = CostModel(a=1.0, b=10.0, c=20.0, nodes=NODES)
STAGE = StageCost(ONE, ONE.scaled(2.0))
CLUSTER = Cluster(16, 64, 4)


def placed(*rings: tuple[int, int, int, int]) -> PlacedRanks:
    """Return a placement of sequences, given tokens, first rank, width and order of each."""
    return PlacedRanks(16, *np.array(rings, dtype=np.int64).T)


def forms_of(found: PlacedRanks) -> list[int]:
    return [1] * len(found.lengths) if found.inner_rings is None else found.inner_rings.tolist()


def test_rings_with_exposed_exchange_get_inner_rings() -> None:
    """The exchange of a plain ring of 8 takes 20 s x 35 hops and overlaps from 700 tokens on; a nested ring takes 8."""
    exposed, hidden, inside, odd = (300, 0, 8, 0), (2000, 8, 8, 0), (100, 0, 4, 1), (300, 5, 8, 2)
    assert forms_of(with_ring_forms(placed(exposed, hidden, inside, odd), STAGE, CLUSTER, ONE_SLICE)) == [2, 1, 1, 1]
    always = replace(CLUSTER, hierarchical_rings="always")
    assert forms_of(with_ring_forms(placed(exposed, hidden, inside, odd), STAGE, always, ONE_SLICE)) == [2, 2, 1, 1]


def test_sequences_that_travel_together_get_one_form() -> None:
    together = with_ring_forms(placed((300, 0, 8, 0), (2000, 0, 8, 0)), STAGE, CLUSTER, ONE_SLICE)
    assert forms_of(together) == [2, 2]
    apart = with_ring_forms(placed((300, 0, 8, 0), (2000, 0, 8, 1)), STAGE, CLUSTER, ONE_SLICE)
    assert forms_of(apart) == [2, 1]


@pytest.mark.parametrize("balance", planner_names())
def test_plans_name_their_forms_and_the_check_knows_nodes(balance: str) -> None:
    planner = HdpPlanner(CLUSTER, (STAGE,), balance=balance, aligned=balance == "pp")
    plan = planner([500, 300, 90, 60, 40, 30, 20, 10])
    check_step_plan(plan, ranks_per_node=4)
    assert isinstance(plan.ranks, PlacedRanks)
    assert max(forms_of(plan.ranks)) > 1
    assert StepPlan.from_json(plan.to_json()) == plan
    assert StepPlan.from_json(plan.to_json()).digest() == plan.digest()
    assert replace(plan, ranks=replace(plan.ranks, inner_rings=None)).digest() != plan.digest()
    with pytest.raises(PlanError, match="inner rings"):
        check_step_plan(plan, ranks_per_node=1)


def test_a_static_mesh_over_nodes_has_inner_rings() -> None:
    """The plan is from the run that ``tests/e2e/hdp/test_oracle.py`` compares with one process."""
    cluster = Cluster(4, 64, 2, "always")
    plan = HdpPlanner(cluster, (STAGE.on(None),), static_width=4)([256, 200, 5, 3, 1])
    assert isinstance(plan.ranks, PlacedRanks)
    assert forms_of(plan.ranks) == [2, 2, 2, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("slowdown", [1.2, 5.0])
def test_no_plan_over_nodes_is_faster_than_the_bounds(slowdown: float) -> None:
    stage = STAGE.on(Nodes(4, slowdown))
    for seed in range(4):
        lengths = np.random.default_rng(seed).integers(1, 900, 12).tolist()
        plan = HdpPlanner(CLUSTER, (stage,))(lengths)
        bound = lower_bounds(lengths, CLUSTER, (stage,)).largest
        assert replay(plan, stage.both).makespan >= bound * (1 - 1e-9)


def test_the_replay_counts_the_form() -> None:
    """For 100 tokens on 8 ranks, the exchange takes 20 s x hops / 8 and attention s^2 / 8."""
    seconds, exposed = {}, {}
    for name, forms in (("plain", None), ("nested", np.array([2]))):
        ring = replace(placed((100, 0, 8, 0)), inner_rings=forms)
        plan = StepPlan(16, 64, (100,), ring)
        table = ShardTable.of(plan)
        seconds[name] = replay(plan, ONE).makespan
        exposed[name] = table.row_exposed(ONE).max()
        stages = replay_stages(plan, (STAGE,))
        assert stages.makespan == pytest.approx(3 * seconds[name])
        assert stages.exposed_seconds.sum() == pytest.approx(3 * table.row_exposed(ONE).sum())
    hops = {"plain": 35.0, "nested": 3 * 1.25 + 1.25 + 3}
    for name, count in hops.items():
        assert exposed[name] == pytest.approx((20 * 100 * count - 100**2) / 8)
    assert seconds["plain"] - seconds["nested"] == pytest.approx(20 * 100 * (hops["plain"] - hops["nested"]) / 8)
