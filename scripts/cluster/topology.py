"""An emulated cluster as a value, and the commands that build its network. Runs nothing.

Every rank has a network namespace with one interface, its own NIC. A switch connects the interfaces: a bridge in a
namespace of its own. Each interface shapes its traffic with two classes, for ranks of its own node and for all other
ranks, so nodes are only a matter of speed::

    rank 0 (node 0)  --eth0--+
    rank 1 (node 0)  --eth0--+-- switch (bridge) --+-- eth0--  rank 2 (node 1)
                                                   +-- eth0--  rank 3 (node 1)

Rank r of node n has the address 10.77.n.(r + 1). The addresses exist only inside the namespaces, and the bridge has no
address, so nothing leaves the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BETWEEN_NODES = "1:2"
"""The class of traffic to other nodes."""

_UNLIMITED_GBPS = 100.0  # faster than the kernel copies
_BURST_BYTES = 64 << 10  # bytes at full speed after a pause, which token buckets need at these rates


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Some ranks that are slow for some steps.

    Attributes:
        ranks: the slow ranks.
        speed: their share of the other ranks' share of a core.
        first, last: first and last slow step, from 1.
    """

    ranks: tuple[int, ...]
    speed: float
    first: int = 1
    last: int = 1 << 30

    def speed_of(self, rank: int, step: int) -> float:
        """Return the speed of a rank in a step, over the speed of the ranks that are never slow."""
        return self.speed if rank in self.ranks and self.first <= step <= self.last else 1.0


@dataclass(frozen=True, slots=True)
class Topology:
    """An emulated cluster.

    Attributes:
        num_nodes, ranks_per_node: shape of the cluster.
        inter_gbps, intra_gbps: Gbit/s from a rank to other nodes and to its own node; 0: as fast as the kernel copies.
        latency_us: delay of each packet between ranks, in microseconds.
        cores_per_rank: share of a core of each rank.
        name: prefix of every namespace and control group; a later start finds leftovers by it.
        slow: ranks with a smaller share of a core, or None.
    """

    num_nodes: int
    ranks_per_node: int
    inter_gbps: float = 0.0
    intra_gbps: float = 0.0
    latency_us: float = 0.0
    cores_per_rank: float = 0.2
    name: str = "bytescale"
    slow: Slowdown | None = None

    def __post_init__(self) -> None:
        if not (1 <= self.num_nodes <= 200 and 1 <= self.ranks_per_node <= 200):
            raise ValueError(
                f"--nodes {self.num_nodes} x --ranks-per-node {self.ranks_per_node}: give 1 to 200 of each"
            )
        if min(self.inter_gbps, self.intra_gbps, self.latency_us) < 0:
            raise ValueError("--inter-gbps, --intra-gbps and --latency-us must not be negative")
        if self.cores_per_rank <= 0:
            raise ValueError(f"--cores-per-rank {self.cores_per_rank:g} must be positive")
        if not self.name.isalnum() or len(self.name) > 10:
            raise ValueError(f"--name {self.name}: give at most 10 letters and digits")

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    def cores(self, step: int) -> list[float]:
        """Return the share of a core of each rank in a step, from 1."""
        speeds = [1.0 if self.slow is None else self.slow.speed_of(rank, step) for rank in range(self.num_ranks)]
        return [self.cores_per_rank * speed for speed in speeds]

    @property
    def switch(self) -> str:
        """Namespace of the bridge."""
        return f"{self.name}-switch"

    def namespace(self, rank: int) -> str:
        """Return the namespace of a rank."""
        return f"{self.name}-{rank}"

    def address(self, rank: int) -> str:
        """Return the IPv4 address of a rank."""
        node, place = divmod(rank, self.ranks_per_node)
        return f"10.77.{node}.{place + 1}"

    def subnet(self, rank: int) -> str:
        """Return the addresses of the node of a rank."""
        return f"10.77.{rank // self.ranks_per_node}.0/24"


def network_commands(topology: Topology) -> Iterator[tuple[str, ...]]:
    """Yield the ``ip`` and ``tc`` commands that build the network, in order."""
    switch = topology.switch
    yield "ip", "netns", "add", switch
    yield "ip", "-n", switch, "link", "add", "bridge", "type", "bridge"
    yield "ip", "-n", switch, "link", "set", "bridge", "up"
    for rank in range(topology.num_ranks):
        own, port = topology.namespace(rank), f"port{rank}"
        yield "ip", "netns", "add", own
        yield "ip", "link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", own
        yield "ip", "-n", switch, "link", "set", port, "master", "bridge", "up"
        yield "ip", "-n", own, "address", "add", f"{topology.address(rank)}/16", "dev", "eth0"
        yield "ip", "-n", own, "link", "set", "lo", "up"
        yield "ip", "-n", own, "link", "set", "eth0", "up"
        yield from _shaping_commands(topology, rank)


def _shaping_commands(topology: Topology, rank: int) -> Iterator[tuple[str, ...]]:
    """Yield the ``tc`` commands of one rank: class 1:1 is its own node, class 1:2 all other nodes.

    With several nodes, unlimited links have classes too, because classes count the bytes.
    """
    if topology.num_nodes == 1 and not (topology.intra_gbps or topology.latency_us):
        return
    tc = ("tc", "-n", topology.namespace(rank))
    device = ("dev", "eth0")
    yield *tc, "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "2", "r2q", "1000"
    for place, gbps in (("1:1", topology.intra_gbps), (BETWEEN_NODES, topology.inter_gbps)):
        rate = f"{round((gbps or _UNLIMITED_GBPS) * 1e6)}kbit"
        burst = ("burst", str(_BURST_BYTES), "cburst", str(_BURST_BYTES))
        yield *tc, "class", "add", *device, "parent", "1:", "classid", place, "htb", "rate", rate, *burst
        if topology.latency_us:
            delay = ("netem", "delay", f"{topology.latency_us:g}us", "limit", "100000")
            yield *tc, "qdisc", "add", *device, "parent", place, *delay
    match = ("u32", "match", "ip", "dst", topology.subnet(rank), "flowid", "1:1")
    yield *tc, "filter", "add", *device, "parent", "1:", "protocol", "ip", *match
