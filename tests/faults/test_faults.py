"""A point of each cheap fault; `python -m tests.faults` tries points of all faults.

tests/e2e/runs/test_failures.py has SIGKILL alone, tests/e2e/runs/test_remote.py killed Ray actors.
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

pytestmark = [pytest.mark.ranks, pytest.mark.full]


def prepared(fault: str) -> tuple[Point, Path, Undisturbed]:
    """Return a point of a fault, its data and its reference run, which all points share."""
    points = (point_of(fault, number) for number in count())
    point = next(point for point in points if (point.layout, point.ckpt_format) == ("rings", "torch_dist"))

    def make(folder: Path) -> Undisturbed:
        write_data(point, folder)
        return undisturbed(point, [folder / "docs"], folder)

    return point, *once(lambda folder: (folder / "docs", make(folder)), "faults")


@pytest.mark.parametrize("fault", ["killed-saving", "planner"])
def test_nothing_is_lost(fault: str, tmp_path: Path) -> None:
    point, corpus, expected = prepared(fault)
    tried = try_point(point, [corpus], expected, tmp_path)
    assert not tried.problems, tried
    assert (tried.resumed_from is not None) == FAULTS[fault].ends, tried


@pytest.mark.skipif(bool(LACKS), reason=LACKS)
def test_nothing_is_lost_when_a_link_is_cut(tmp_path: Path) -> None:
    point, corpus, expected = prepared("cut-link")
    topology = Topology(NUM_RANKS, 1, name="bsfaults")
    with cluster(topology):
        tried = try_point(point, [corpus], expected, tmp_path, topology)
    assert not tried.problems, tried
    assert tried.resumed_from is not None, tried
