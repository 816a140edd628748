"""Speed of an exchange: messages of a rank, and two new processes that exchange. No test depends on real time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bytescale_ext.measure import ring_speed, speeds
from bytescale_ext.measure.ring_speed import (
    REPEATS,
    bytes_per_second_of_nodes,
    bytes_per_second_of_two_processes,
    collective_latency,
    collective_seconds_per_byte,
    exchanged_bytes_per_second,
)
from bytescale_ext.parallel.p2p import RingComm
from tests.harness import run_ranks


def exchange(rank: int, world: int) -> tuple[float, int, int]:
    comm = RingComm(None, rank, world)
    rate = exchanged_bytes_per_second(comm, torch.device("cpu"), num_bytes=1 << 12)
    return rate, comm.stats.bytes_sent, comm.stats.num_exchanges


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_sends_and_receives(world: int) -> None:
    for rate, sent, exchanges in run_ranks(exchange, world):
        assert 0 < rate < float("inf")
        assert (sent, exchanges) == (REPEATS << 12, REPEATS)


def exchange_over_nodes(rank: int, world: int) -> tuple[tuple[float, float], int]:
    comm = RingComm(None, rank, world)
    return bytes_per_second_of_nodes(comm, 2, torch.device("cpu"), num_bytes=1 << 12), comm.stats.bytes_sent


@pytest.mark.ranks
def test_all_ranks_agree_on_the_rates_of_nodes() -> None:
    found = run_ranks(exchange_over_nodes, 4)
    assert len({rates for rates, _ in found}) == 1
    assert all(0 < rate < float("inf") for rate in found[0][0])
    assert {sent for _, sent in found} == {2 * REPEATS << 12}


def collectives(rank: int, world: int) -> tuple[float, float]:
    device = torch.device("cpu")
    return collective_seconds_per_byte(dist.group.WORLD, device, num_bytes=1 << 12), collective_latency(
        dist.group.WORLD, device
    )


@pytest.mark.ranks
def test_all_ranks_agree_on_the_time_of_collectives() -> None:
    first, second = run_ranks(collectives, 2)
    assert first == second
    assert all(0 < seconds < 1.0 for seconds in first)


def test_the_fastest_exchange_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        def wait(self) -> None:
            pass

    class Comm:
        rank, size = 0, 2

        def exchange(self, sends: Any, receives: Any) -> Done:
            assert sends[0][1] == receives[0][1] == 1
            return Done()

    durations = [4.0, 2.0, *[3.0] * (REPEATS - 2)]
    readings = iter([reading for duration in durations for reading in (0.0, duration)])
    monkeypatch.setattr(speeds.time, "perf_counter", lambda: next(readings))
    assert exchanged_bytes_per_second(Comm(), torch.device("cpu"), 1000) == 500  # type: ignore[arg-type]


@pytest.mark.ranks
def test_two_processes() -> None:
    assert 0 < bytes_per_second_of_two_processes(on_cuda=False) < float("inf")


@pytest.mark.ranks
def test_processes_that_fail_are_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_speed, "_run_rank", abs)  # fails immediately in the new process
    with pytest.raises(ValueError, match="give --ring-bytes-per-second"):
        bytes_per_second_of_two_processes(on_cuda=False)
