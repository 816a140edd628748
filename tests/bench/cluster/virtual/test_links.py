"""Max-min fair rates: against brute force, and against rates that SimGrid computes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from scripts.bench.cluster.virtual.flows import Flows
from scripts.bench.cluster.virtual.links import Link, Links, fair_rates
from tests.sample import sampled


def brute_force(paths: dict[int, tuple[Link, ...]], capacity: dict[Link, float]) -> dict[int, float]:
    """Return the fair rates by raising all rates in small equal steps until a link of a flow is full."""
    rates, step = dict.fromkeys(paths, 0.0), min(capacity.values()) / 20000
    growing = set(paths)
    while growing:
        for flow in growing:
            rates[flow] += step
        for link, limit in capacity.items():
            if sum(rates[flow] for flow, path in paths.items() if link in path) >= limit - step * len(paths) / 2:
                growing -= {flow for flow, path in paths.items() if link in path}
    return rates


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(6), [0]))
def test_rates_equal_those_of_small_steps(seed: int) -> None:
    random = np.random.default_rng(seed)
    links: list[Link] = [(name, number) for name, number in product(("node out", "node in"), range(4))]
    capacity = {link: float(random.integers(1, 9)) for link in links}
    paths = {flow: tuple(links[one] for one in random.choice(8, 2, replace=False)) for flow in range(7)}
    expected = brute_force(paths, capacity)
    rates = fair_rates(paths, capacity)
    assert rates == pytest.approx(expected, rel=0.01)


def test_two_messages_to_one_device_take_half_of_its_link_until_one_ends() -> None:
    flows = Flows(Links(1, 1.0, 10.0))
    flows.begin(1, 0, 2, 10.0, 0.0)
    flows.begin(2, 1, 2, 20.0, 0.0)
    assert flows.next_end() == pytest.approx(2.0, rel=1e-6)  # 10 bytes at half of 10 bytes per second
    assert flows.end() == 1
    assert flows.next_end() == pytest.approx(3.0, rel=1e-6)  # 10 bytes are left, at the whole rate
    assert flows.end() == 2
    assert flows.next_end() is None


def test_messages_inside_a_node_and_between_nodes_share_nothing() -> None:
    flows = Flows(Links(2, 100.0, 10.0))
    flows.begin(1, 0, 1, 100.0, 0.0)
    flows.begin(2, 0, 2, 10.0, 0.0)
    flows.begin(3, 3, 1, 10.0, 0.0)
    assert [flows.next_end(), flows.end(), flows.end(), flows.end()] == [pytest.approx(1.0), 1, 2, 3]
