"""Value of an emulated cluster: addresses, and the commands that build its network."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.cluster.topology import Slowdown, Topology, network_commands


def test_ranks_of_a_node_share_a_subnet() -> None:
    topology = Topology(2, 3)
    assert [topology.address(rank) for rank in range(6)] == [
        "10.77.0.1", "10.77.0.2", "10.77.0.3", "10.77.1.1", "10.77.1.2", "10.77.1.3"
    ]  # fmt: skip
    assert [topology.subnet(rank) for rank in (0, 2, 3, 5)] == ["10.77.0.0/24"] * 2 + ["10.77.1.0/24"] * 2
    assert topology.num_ranks == 6


def test_some_ranks_are_slow_for_some_steps() -> None:
    topology = Topology(1, 3, cores_per_rank=0.4, slow=Slowdown((1, 2), 0.5, 2, 3))
    assert [topology.cores(step) for step in (1, 2, 3, 4)] == [[0.4] * 3, *[[0.4, 0.2, 0.2]] * 2, [0.4] * 3]
    assert Topology(1, 2).cores(7) == [0.2, 0.2]


def test_every_rank_has_one_interface_at_the_bridge() -> None:
    commands = list(network_commands(Topology(2, 2)))
    made = [command[-1] for command in commands if command[:3] == ("ip", "netns", "add")]
    assert made == ["bytescale-switch", *(f"bytescale-{rank}" for rank in range(4))]
    ports = [command for command in commands if "master" in command]
    assert len(ports) == 4
    rates = {command[command.index("rate") + 1] for command in commands if "classid" in command}
    assert rates == {"100000000kbit"}, "the classes of unlimited links only count"
    assert not [command for command in network_commands(Topology(1, 2)) if command[0] == "tc"]


def test_links_are_shaped_by_the_node_of_the_receiver() -> None:
    commands = [c for c in network_commands(Topology(2, 2, inter_gbps=0.4, intra_gbps=4)) if c[0] == "tc"]
    of_last = [command for command in commands if command[2] == "bytescale-3"]
    rates = {c[c.index("classid") + 1]: c[c.index("rate") + 1] for c in of_last if "class" in c}
    assert rates == {"1:1": "4000000kbit", "1:2": "400000kbit"}
    (rule,) = (command for command in of_last if "filter" in command)
    assert rule[rule.index("dst") + 1] == "10.77.1.0/24"
    assert rule[rule.index("flowid") + 1] == "1:1"
    assert not [command for command in commands if "netem" in command]


def test_latency_delays_both_classes() -> None:
    delays = [c for c in network_commands(Topology(1, 2, latency_us=50)) if "netem" in c]
    assert [command[command.index("parent") + 1] for command in delays] == ["1:1", "1:2"] * 2
    assert all(command[command.index("delay") + 1] == "50us" for command in delays)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_nodes": 0}, "--nodes 0"),
        ({"ranks_per_node": 201}, "--ranks-per-node 201"),
        ({"inter_gbps": -1.0}, "negative"),
        ({"cores_per_rank": 0.0}, "--cores-per-rank 0"),
        ({"name": "a b"}, "--name a b"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Topology(**{"num_nodes": 1, "ranks_per_node": 1, **values})
