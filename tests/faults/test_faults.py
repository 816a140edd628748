"""One point of each fault that is cheap; `python -m tests.faults` tries all of them.

SIGKILL alone is in tests/e2e/runs/test_failures.py, killed Ray actors are in tests/e2e/runs/test_remote.py.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from scripts.cluster.emulate import cluster
from scripts.cluster.topology import Topology
from tests.cluster.test_emulate import LACKS
from tests.e2e.once import once
from tests.faults.jobs import write_data
from tests.faults.points import FAULTS, NUM_RANKS, Point, point_of
from tests.faults.trials import Undisturbed, try_point, undisturbed

pytestmark = pytest.mark.ranks


def point_in(layout: str, fault: str) -> Point:
    """Return the first point of a fault in a layout and in Megatron's usual format; most share a run without faults."""
    points = (point_of(fault, number) for number in count())
    return next(point for point in points if (point.layout, point.ckpt_format) == (layout, "torch_dist"))


def prepared(layout: str, fault: str) -> tuple[Point, Path, Undisturbed]:
    """Return the point of a fault, its data and what the run without the fault leaves."""
    point = point_in(layout, fault)

    def make(folder: Path) -> Undisturbed:
        write_data(point, folder)
        return undisturbed(point, [folder / "docs"], folder)

    return point, *once(lambda folder: (folder / "docs", make(folder)), "faults", layout)


@pytest.mark.parametrize("fault", ["stopped", "killed-saving", "cut-short", "planner"])
def test_nothing_is_lost(fault: str, tmp_path: Path) -> None:
    point, corpus, wanted = prepared("rings", fault)
    tried = try_point(point, [corpus], wanted, tmp_path)
    assert not tried.problems, tried
    assert (tried.resumed_from is not None) == FAULTS[fault].ends, tried


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    point, corpus, wanted = prepared("alone", "slow")
    tried = try_point(point, [corpus], wanted, tmp_path)
    assert not tried.problems, tried


@pytest.mark.skipif(bool(LACKS), reason=LACKS)
@pytest.mark.parametrize("fault", ["cut-link", "full-disk"])
def test_nothing_is_lost_on_an_emulated_network(fault: str, tmp_path: Path) -> None:
    point, corpus, wanted = prepared("rings", fault)
    topology = Topology(NUM_RANKS, 1, name="bsfaults")
    with cluster(topology):
        tried = try_point(point, [corpus], wanted, tmp_path, topology)
    assert not tried.problems, tried
    assert tried.resumed_from is not None, tried
