"""Predicted steps of the emulated cluster: costs in wall time, rings over nodes, groups with barriers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.cost.model_shape import key_value_bytes
from bytescale_ext.plan.evaluate.schedulers import planned_by
from bytescale_ext.plan.setup.choose import choose
from bytescale_ext.plan.setup.planner import scenario_of
from bytescale_ext.plan.setup.setup import setup_of_cost
from bytescale_ext.plan.step.sizes import Cluster
from megatron.bytescale.cli.shared.megatron_hybrid import megatron_hybrid
from scripts.bench.cluster.cases import ARMS, Case
from scripts.bench.cluster.predict import predicted_seconds, wall_cost
from scripts.cluster.topology import Topology
from tests.bench.cluster.samples import COST

CASE = Case("byted", 2, 4)
LENGTHS = CASE.lengths(num_steps=1, seed=0)


def slower(factor: float) -> float:
    """Return Gbit/s at which keys arrive ``factor`` times slower than in the costs."""
    return key_value_bytes(COST.shape, 1, 4) / COST.forward.c * 8e-9 / factor / 0.95


def test_work_takes_its_share_of_a_core_and_exchange_the_link() -> None:
    cost = wall_cost(COST, Topology(2, 4, slower(6.0), slower(3.0), cores_per_rank=0.25))
    assert cost.forward.a == pytest.approx(4 * COST.forward.a)
    assert cost.backward.b == pytest.approx(4 * COST.backward.b)
    assert cost.head_forward == pytest.approx(4 * COST.head_forward)
    assert cost.forward.c == pytest.approx(3 * COST.forward.c)
    assert cost.backward.c == pytest.approx(3 * COST.backward.c)
    assert cost.slowdown == pytest.approx(2.0)


def test_no_link_is_faster_than_an_unlimited_link() -> None:
    for gbps in (0.0, 1e9):
        cost = wall_cost(COST, Topology(2, 4, gbps, gbps, cores_per_rank=0.25))
        assert (cost.forward.c, cost.slowdown) == (pytest.approx(COST.forward.c), 1.0)


def test_a_step_is_the_replay_of_its_plan() -> None:
    scenario = scenario_of(choose(setup_of_cost(COST, 1, Cluster(8, 2048, 4, "off"), CASE.context)))
    assert predicted_seconds(ARMS["naive"], CASE, LENGTHS, COST) == pytest.approx(
        planned_by("none")(LENGTHS, scenario).makespan, rel=0.02
    )

    seconds = predicted_seconds(ARMS["hybrid"], CASE, LENGTHS, COST)
    assert seconds == pytest.approx(megatron_hybrid(LENGTHS, scenario).makespan, rel=0.05)


@pytest.mark.parametrize(("arm", "nodes", "is_slower"), [("static", 2, True), ("static", 1, False), ("ours", 1, False)])
def test_rings_over_nodes_wait_for_slower_links(arm: str, nodes: int, is_slower: bool) -> None:
    case = replace(CASE, num_nodes=nodes, ranks_per_node=8 // nodes)
    fast = predicted_seconds(ARMS[arm], case, LENGTHS, COST)
    slow = predicted_seconds(ARMS[arm], case, LENGTHS, replace(COST, slowdown=100.0))
    assert fast is not None
    assert slow is not None
    assert slow > 10 * fast if is_slower else slow == fast


def test_pipelines_are_not_predicted() -> None:
    assert predicted_seconds(ARMS["slices"], CASE, LENGTHS, COST) is None
