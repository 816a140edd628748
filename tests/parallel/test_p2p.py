"""Exchange between processes: rings, groups, lost peers and counted bytes."""

from __future__ import annotations

import os
import weakref

import pytest
import torch
import torch.distributed as dist

from bytescale_ext.parallel.p2p import RingComm, WorksPending
from tests.harness import run_ranks


def exchange_all(rank: int, world: int) -> dict[str, object]:
    """Exchange in a ring of 3: tensors of different lengths, several exchanges at once, and empty tensors."""
    comm = RingComm(None, rank, world)
    comm.warm_up("cpu")
    found: dict[str, object] = {"after warm-up": (comm.stats.bytes_sent, comm.stats.num_exchanges)}
    # A ring of three with tensors of different lengths.
    mine = torch.full((rank + 2,), float(rank))
    received = torch.empty((rank - 1) % world + 2)
    pending = comm.exchange([(mine, (rank + 1) % world)], [(received, (rank - 1) % world)])
    # Two more exchanges are posted before the first completes. They match in the order of posting.
    second, third = torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    values = [torch.tensor([10 * rank + n]) for n in (2, 3)]
    later = [
        comm.exchange([(value, (rank + 1) % world)], [(target, (rank - 1) % world)])
        for value, target in zip(values, (second, third), strict=True)
    ]
    for item in (pending, *later, pending):
        item.wait()
    found["ring"] = (received.tolist(), int(second), int(third))
    found["stats"] = (comm.stats.bytes_sent, comm.stats.num_exchanges)
    comm.stats.reset()
    comm.exchange([(torch.empty(0), (rank + 1) % world)], [(torch.empty(0), (rank - 1) % world)]).wait()
    found["empty"] = (comm.stats.bytes_sent, comm.stats.num_exchanges)
    return found


def exchange_in_subgroup(rank: int, world: int) -> list[float]:
    """Exchange in a ring of three in a group that is not the world and has another order of ranks."""
    members = [1, 3, 2]
    group = dist.new_group(members, use_local_synchronization=False)
    if rank not in members:
        return []
    place = dist.get_group_rank(group, rank)
    comm = RingComm(group, place, len(members))
    comm.warm_up("cpu")
    received = torch.empty(1)
    comm.exchange(
        [(torch.tensor([float(place)]), (place + 1) % 3)],
        [(received, (place - 1) % 3)],
    ).wait()
    return received.tolist()


def claim_a_wrong_place(rank: int, world: int) -> None:
    RingComm(None, rank, world)
    with pytest.raises(ValueError, match=f"HDP rank {rank + 1} of 2 is rank {rank} of 2"):
        RingComm(None, rank + 1, world)
    with pytest.raises(ValueError, match=f"is rank {rank} of 2 in the process group"):
        RingComm(None, rank, world + 1)


def wait_for_a_dead_peer(rank: int, world: int) -> str:
    comm = RingComm(None, rank, world)
    comm.warm_up("cpu")
    if rank == 1:
        os._exit(5)
    received = torch.empty(1 << 16)
    try:
        comm.exchange([(torch.zeros(1 << 16), 1)], [(received, 1)]).wait()
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "no error"


@pytest.mark.ranks
def test_tensors_arrive_and_are_counted() -> None:
    for rank, found in enumerate(run_ranks(exchange_all, 3)):
        previous = (rank - 1) % 3
        assert found["after warm-up"] == (0, 0)
        assert found["ring"] == ([float(previous)] * (previous + 2), 10 * previous + 2, 10 * previous + 3)
        assert found["stats"] == (4 * (rank + 2) + 2 * 8, 3)
        assert found["empty"] == (0, 0)


@pytest.mark.ranks
def test_peers_are_ranks_of_the_group() -> None:
    results = run_ranks(exchange_in_subgroup, 4)
    assert results[0] == []
    assert sorted(value for result in results for value in result) == [0.0, 1.0, 2.0]


@pytest.mark.ranks
def test_warm_up_of_one_and_of_two_ranks() -> None:
    RingComm(None, 0, 1).warm_up("cpu")
    assert run_ranks(warm_up_only, 2) == [(0, 0), (0, 0)]


def warm_up_only(rank: int, world: int) -> tuple[int, int]:
    comm = RingComm(None, rank, world)
    comm.warm_up("cpu")
    return comm.stats.bytes_sent, comm.stats.num_exchanges


@pytest.mark.ranks
def test_a_group_in_another_order_is_refused() -> None:
    run_ranks(claim_a_wrong_place, 2)


@pytest.mark.ranks
def test_a_dead_peer_is_an_error() -> None:
    results = run_ranks(wait_for_a_dead_peer, 2, may_die={1})
    assert results[0].startswith("RuntimeError")
    assert results[1] is None


class RecordedWork:
    """Request that records its waits."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(self.name)


def test_requests_are_waited_for_once_and_keep_their_tensors_until_then() -> None:
    log: list[str] = []
    tensor = torch.zeros(3)
    kept = weakref.ref(tensor)
    pending = WorksPending([RecordedWork(log, "send"), RecordedWork(log, "receive")], [tensor], [1])
    del tensor
    assert kept() is not None
    pending.wait()
    assert kept() is None
    pending.wait()
    assert log == ["send", "receive"]
