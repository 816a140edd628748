"""Links of a modelled cluster, and how the messages on them share them: max-min fair.

A device has four links: to and from its node, and to and from other nodes. A message between nodes uses the second pair
of its two devices, a message inside a node the first pair. Switches have no limit of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

Link = tuple[str, int]


@dataclass(frozen=True)
class Links:
    """Links of all devices.

    Attributes:
        ranks_per_node: devices of a node; process r is on node ``r // ranks_per_node``.
        node_bytes, network_bytes: bytes per second of a device inside its node and between nodes, in each direction.
        node_latency, network_latency: seconds of a message without bytes.
    """

    ranks_per_node: int
    node_bytes: float
    network_bytes: float
    node_latency: float = 0.0
    network_latency: float = 0.0

    def are_near(self, sender: int, receiver: int) -> bool:
        """Return whether two processes are on one node."""
        return sender // self.ranks_per_node == receiver // self.ranks_per_node

    def path(self, sender: int, receiver: int) -> tuple[Link, Link]:
        """Return the links of a message."""
        if self.are_near(sender, receiver):
            return ("node out", sender), ("node in", receiver)
        return ("network out", sender), ("network in", receiver)

    def latency(self, sender: int, receiver: int) -> float:
        """Return the seconds of a message without bytes."""
        return self.node_latency if self.are_near(sender, receiver) else self.network_latency

    def capacity(self, link: Link) -> float:
        """Return the bytes per second of a link."""
        return self.node_bytes if link[0].startswith("node") else self.network_bytes


def fair_rates[Flow: Hashable](
    paths: Mapping[Flow, Sequence[Link]], capacity: Mapping[Link, float]
) -> dict[Flow, float]:
    """Return the max-min fair rate of each flow: no rate can grow unless a rate that is not larger shrinks.

    Progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2): the link with the least fair share
    fixes the rates of its flows, then the rest is shared again.
    """
    left = {link: capacity[link] for path in paths.values() for link in path}
    users: dict[Link, list[Flow]] = {link: [] for link in left}
    for flow, path in paths.items():
        for link in path:
            users[link].append(flow)
    counts = {link: len(flows) for link, flows in users.items()}
    rates: dict[Flow, float] = {}
    while counts:
        tightest = min(counts, key=lambda link: left[link] / counts[link])
        rate = left[tightest] / counts[tightest]
        for flow in users[tightest]:
            if flow in rates:
                continue
            rates[flow] = rate
            for link in paths[flow]:
                left[link] -= rate
                counts[link] -= 1
                if not counts[link]:
                    del counts[link]
    return rates
