"""Control groups of the ranks of an emulated cluster, in both versions."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.cluster.quotas import QuotaGroups
from tests.cluster.test_emulate import NAME, needs_cluster


@needs_cluster
def test_quotas_are_written(tmp_path: Path) -> None:
    groups = QuotaGroups(NAME, 2)
    groups.create()
    try:
        groups.limit([0.25, 0.125])
        name = "cpu.cfs_quota_us" if groups.is_v1 else "cpu.max"
        assert {(folder / name).read_text().split()[0] for folder in groups.folders} == {"2500", "1250"}
    finally:
        groups.remove()


@needs_cluster
def test_processes_that_a_rank_starts_leave_its_group() -> None:
    groups = QuotaGroups(NAME, 2)
    groups.create()
    started = [subprocess.Popen(["sleep", "400"]) for _ in range(2)]
    rank, helper = (process.pid for process in started)
    try:
        for pid in (rank, helper):
            (groups.folders[1] / "cgroup.procs").write_text(str(pid))
        groups.release_helpers(1, rank)
        assert groups.processes(1) == [rank]
        assert (groups.helpers / "cgroup.procs").read_text().split() == [str(helper)]
    finally:
        groups.remove()
        for process in started:
            process.kill()
            process.wait()


def test_version_2_groups(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu io memory\n")
    groups = QuotaGroups("bstest", 2, tmp_path)
    groups.create()
    groups.limit([0.5, 0.25])
    assert [(folder / "cpu.max").read_text() for folder in groups.folders] == ["5000 10000", "2500 10000"]
    assert (groups.helpers / "cpu.weight").read_text() == "1"
    assert (groups.top / "cgroup.subtree_control").read_text() == "+cpu"


def test_a_machine_without_control_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no control groups with a cpu controller"):
        QuotaGroups("bstest", 2, tmp_path)
