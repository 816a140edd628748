"""Rings over several nodes: number of inner rings, and time of the exchange."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.nodes import FEWEST_HOPS, Nodes


def integers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    ("first", "width", "inner_rings"),
    [
        (0, 4, 1),  # one node
        (0, 8, 2),  # two nodes
        (4, 12, 3),  # three nodes
        (2, 4, 2),  # two ranks on each of two nodes
        (2, 6, 3),  # half a node and a whole node
        (0, 6, 3),
        (2, 8, 4),
        (1, 6, 1),  # begins at an odd rank
        (0, 7, 1),  # ends at an odd rank
        (2, 2, 1),
    ],
)
def test_inner_rings_tile_nodes_of_four(first: int, width: int, inner_rings: int) -> None:
    firsts, widths = integers(first), integers(width)
    assert Nodes(4, 3.0).inner_rings(firsts, widths).tolist() == [inner_rings]
    assert Nodes(4, 3.0, hierarchical=False).inner_rings(firsts, widths).tolist() == [1]


def slowest_hops(route: Route, nodes: Nodes) -> float:
    """Count hops step by step. A step takes the slower of the message inside a node and the part between nodes."""
    total, inner = 0.0, route.inner_width
    for step in range(route.width - 1 if route.inner_rings == 1 else route.width):
        number, hop = divmod(step, inner)
        inside = 1.0 if hop < inner - 1 else 0.0
        if route.inner_rings == 1 and nodes.cross_nodes(integers(route.ring[0]), integers(route.width))[0]:
            inside = nodes.slowdown
        between = nodes.slowdown / inner if number < route.inner_rings - 1 else 0.0
        total += max(inside, between)
    return total


@pytest.mark.parametrize("slowdown", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("node", [2, 3, 4, 8])
def test_hops_are_those_of_the_steps(node: int, slowdown: float) -> None:
    nodes = Nodes(node, slowdown)
    for first in range(node):
        for width in range(2, 17):
            firsts, widths = integers(first), integers(width)
            for inner_rings in {1, int(nodes.inner_rings(firsts, widths)[0])}:
                route = Route(tuple(range(first, first + width)), 0, inner_rings)
                found = nodes.hops(firsts, widths, integers(inner_rings))
                assert found == pytest.approx(slowest_hops(route, nodes)), f"{first=} {width=} {inner_rings=}"


@pytest.mark.parametrize("slowdown", [1.01, 2.0, 9.0])
@pytest.mark.parametrize("node", [2, 3, 4, 8])
def test_no_ring_takes_fewer_hops_than_the_floor(node: int, slowdown: float) -> None:
    nodes, widths = Nodes(node, slowdown), np.arange(2, 65)
    for first in range(node):
        firsts = np.full_like(widths, first)
        for forms in (np.ones_like(widths), nodes.inner_rings(firsts, widths)):
            assert (nodes.hops(firsts, widths, forms) >= FEWEST_HOPS * (widths - 1) - 1e-9).all()
    cost = CostModel(1e-9, 1.0, c=2.0, nodes=nodes)
    assert (cost.floor().c, cost.floor().nodes) == (1.5, None)
    plain = CostModel(1e-9, 1.0, c=2.0, nodes=Nodes(node, slowdown, hierarchical=False))
    assert (plain.floor().c, plain.floor().nodes) == (2.0, None)


def test_wide_rings_cost_the_hops_of_their_faster_form() -> None:
    """A ring of 8 on two nodes of 4 with links of 1/3 of the speed takes 21 hops, or 3 + 3 / 4 + 3 with inner rings."""
    plain, nested = (CostModel(1e-9, 1.0, c=1.0, nodes=Nodes(4, 3.0, form)) for form in (False, True))
    assert (plain.hops(8.0), nested.hops(8.0)) == (21.0, 6.75)
    assert plain.hops(4.0) == nested.hops(4.0) == 3.0
    assert nested.hops(np.array([1.0, 2.0, 8.0])).tolist() == [0.0, 1.0, 6.75]
    assert nested.attention_cost(80.0, 8.0) == pytest.approx(67.5)
    assert nested.attention_cost(np.array([80.0]), np.array([8.0]), np.array([21.0])).tolist() == [210.0]
    assert nested.scaled(2.0).nodes == (nested + nested).nodes == Nodes(4, 3.0)
