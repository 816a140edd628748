"""The exchange of plain and hierarchical rings, timed by four ranks."""

from __future__ import annotations

import pytest

from bytescale_ext.parallel.p2p import RingComm
from scripts.bench.cluster.exchange import DIM, HEADS, layout_of, time_passes
from tests.harness import run_ranks


def time_both(rank: int, world: int) -> list[tuple[list[float], int]]:
    comm = RingComm(None, rank, world)
    found = []
    for inner_rings in (1, 2):
        comm.stats.reset()
        found.append((time_passes(comm, layout_of(64, rank, world, inner_rings)), comm.stats.bytes_sent))
    return found


@pytest.mark.ranks
def test_a_pass_is_the_exchange_of_a_ring_and_nothing_else() -> None:
    ranks = run_ranks(time_both, 4)
    assert all(one == ranks[0] for one in ranks), "ranks agree on the slowest"
    for seconds, num_bytes in ranks[0]:
        assert len(seconds) == 2
        assert min(seconds) > 0
        # Three shares of 16 tokens: keys and values forward, backward again, and the sums of their gradients.
        assert num_bytes == 3 * 3 * 2 * 16 * HEADS * DIM * 4
