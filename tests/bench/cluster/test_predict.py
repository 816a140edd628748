"""Predicted steps of the emulated cluster: costs in wall time, rings over nodes, groups with barriers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.cost.model_shape import key_value_bytes
from bytescale_ext.plan.evaluate.replay import replay
from bytescale_ext.plan.evaluate.schedulers import Scenario
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.sizes import Cluster
from megatron.bytescale.cli.shared.megatron_hybrid import megatron_hybrid
from scripts.bench.cluster.cases import ARMS, Case
from scripts.bench.cluster.predict import predicted_seconds, topology_costs, wall_cost
from tests.bench.cluster.samples import COST

CASE = Case("byted", 2, 4)
LENGTHS = CASE.lengths(num_steps=1, seed=0)
STAGE = COST.whole()


def slower_links(factor: float) -> tuple[float, float]:
    """Return Gbit/s at which keys arrive so many times slower than the costs say."""
    rate = key_value_bytes(COST.shape, 1, 4) / COST.forward.c * 8e-9 / factor / 0.95
    return rate, rate


def test_work_takes_its_share_of_a_core_and_exchange_the_link() -> None:
    found = wall_cost(COST, 0.25, slower_links(3.0)[0])
    assert found.forward.a == pytest.approx(4 * COST.forward.a)
    assert found.backward.b == pytest.approx(4 * COST.backward.b)
    assert found.head_forward == pytest.approx(4 * COST.head_forward)
    assert found.forward.c == pytest.approx(3 * COST.forward.c)
    assert found.backward.c == pytest.approx(3 * COST.backward.c)
    assert wall_cost(COST, 0.25, 0.0).forward.c == COST.forward.c
    assert wall_cost(COST, 0.25, 1e9).forward.c == COST.forward.c, "no link is faster than unlimited ones"


def test_links_inside_and_between_nodes_have_their_own_cost() -> None:
    inside, between = topology_costs(COST, replace(CASE.topology((0.0, 0.0)), inter_gbps=slower_links(2.0)[0]))
    assert between.forward.c == pytest.approx(2 * inside.forward.c)
    assert between.forward.a == inside.forward.a


@pytest.mark.parametrize("arm", ["ours", "naive", "bytescale", "static"])
def test_with_equal_links_it_is_the_replay_of_the_plan(arm: str) -> None:
    width = 8 if arm == "static" else None
    plan = HdpPlanner(
        Cluster(8, 2048, 4), (STAGE,), balance=ARMS[arm].balance or "", static_width=width
    )(LENGTHS)  # fmt: skip
    assert predicted_seconds(ARMS[arm], CASE, LENGTHS, STAGE, STAGE) == pytest.approx(replay(plan, STAGE.both).makespan)


def test_rings_over_nodes_wait_for_slower_links() -> None:
    slow = replace(STAGE, forward=replace(STAGE.forward, c=1.0), backward=replace(STAGE.backward, c=1.0))
    one_node = replace(CASE, num_nodes=1, ranks_per_node=8)
    for arm, case, is_slower in (("static", CASE, True), ("static", one_node, False), ("hybrid", one_node, False)):
        fast = predicted_seconds(ARMS[arm], case, LENGTHS, STAGE, STAGE)
        found = predicted_seconds(ARMS[arm], case, LENGTHS, STAGE, slow)
        assert fast is not None
        assert found is not None
        assert found > 10 * fast if is_slower else found == fast


def test_groups_end_before_the_next_begin() -> None:
    scenario = Scenario.of(Cluster(8, 2048, 4), CASE.context, COST)
    found = predicted_seconds(ARMS["hybrid"], CASE, LENGTHS, STAGE, STAGE)
    assert found == pytest.approx(megatron_hybrid(LENGTHS, scenario).makespan, rel=0.05)


def test_pipelines_are_not_predicted() -> None:
    assert predicted_seconds(ARMS["eager"], CASE, LENGTHS, STAGE, STAGE) is None
