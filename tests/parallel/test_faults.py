"""Errors name the failed operation when a peer is lost."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from bytescale_ext.parallel.faults import PeerLost, failure_text, is_peer_error
from bytescale_ext.parallel.p2p import RingComm
from tests.harness import free_port, run_ranks


def lose_a_peer(rank: int, world: int) -> list[str]:
    """Rank 1 ends. Return rank 0's errors of a collective, of an exchange, and of a later exchange."""
    import os

    group = dist.new_group([0, 1])
    dist.barrier(group)
    if rank == 1:
        os._exit(0)
    said = []
    for one in (group, None):
        with pytest.raises(RuntimeError) as of_collective:
            dist.all_reduce(torch.zeros(1), group=one)
        said.append(failure_text(of_collective.value))
    comm = RingComm(None, 0, 2)
    for _ in range(2):
        with pytest.raises(PeerLost) as lost:
            comm.exchange([(torch.zeros(1 << 16), 1)], [(torch.zeros(1 << 16), 1)]).wait()
        said.append(failure_text(lost.value))
    return said


@pytest.mark.ranks
def test_a_collective_and_an_exchange_name_their_ranks() -> None:
    said = run_ranks(lose_a_peer, 2, may_die=[1])[0]
    collective = "all_reduce over ranks 0, 1 in lose_a_peer (test_faults.py) failed: "
    assert all(one.startswith(collective) for one in said[:2])
    assert all(one.startswith("the exchange with HDP rank 1 failed: ") for one in said[2:])
    assert not any("\n" in one for one in said)


def wait_for_nobody(rank: int, world: int) -> str:
    """Return the error of a rank if the others do not start."""
    port = free_port()
    place, soon = f"tcp://127.0.0.1:{port}", datetime.timedelta(seconds=1)
    with pytest.raises(RuntimeError) as found:
        dist.init_process_group("gloo", init_method=place, rank=0, world_size=2, timeout=soon)
    assert is_peer_error(found.value)
    return failure_text(found.value)


@pytest.mark.ranks
def test_ranks_that_do_not_start_are_missed() -> None:
    said = run_ranks(wait_for_nobody, 1, init_group=False)[0]
    assert said.startswith("init_process_group in wait_for_nobody (test_faults.py) failed: Timed out after ")
