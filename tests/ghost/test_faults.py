"""A rank that loses a peer on NCCL: its last line, before the watchdog of torch ends the process."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.training import train_to_failure
from tests.ghost.cases import CASES
from tests.ghost.devices import GHOST_GPUS, needs_ghosts
from tests.ghost.training import train_drawn
from tests.harness import ranks_on

pytestmark = [pytest.mark.ranks, pytest.mark.full, needs_ghosts]

(RINGS,) = (case for case in CASES if case.name == "rings in float32")
TIMEOUT_MINUTES = 1


def train_until_a_rank_stops(folder: str) -> None:
    """Entry that stops rank 1 in a ring of the second step, and writes the errors of each rank to a file."""
    import os
    import sys

    from bytescale_ext.parallel.p2p import RingComm
    from megatron.bytescale import faults

    rank = int(os.environ["RANK"])
    sys.stderr = open(Path(folder, f"errors{rank}.txt"), "w", buffering=1)
    exchange = RingComm.exchange

    def stop(self: RingComm, *transfers: object) -> object:
        if rank == 1 and "step 2" in faults._when():
            time.sleep(100 * TIMEOUT_MINUTES)
            os._exit(1)
        return exchange(self, *transfers)  # type: ignore[arg-type]

    RingComm.exchange = stop  # type: ignore[method-assign,assignment]
    train_drawn()


def test_the_last_line_names_step_ring_and_peer(corpus: Path, tmp_path: Path) -> None:
    flags = [*RINGS.argv(corpus, tmp_path / "logs"), "--distributed-timeout-minutes", TIMEOUT_MINUTES]
    with ranks_on(GHOST_GPUS):
        train_to_failure(2, *flags, entry=partial(train_until_a_rank_stops, str(tmp_path)), folder=tmp_path)
    (line,) = re.findall("^PeerLost: .*", (tmp_path / "errors0.txt").read_text(), re.MULTILINE)
    start = "PeerLost: rank 0, step 2: the exchange of BYTESCALE_RINGS with rank 1 has not ended for "
    assert line.startswith(start), line
    assert "A rank has ended or hangs" in line
