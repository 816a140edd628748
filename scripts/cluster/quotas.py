"""Control groups that give every rank of an emulated cluster a fixed share of a core."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

PERIOD_US = 10_000


class QuotaGroups:
    """A control group for the cluster with one group for each rank: version 1 (``cpu``) or version 2.

    The processes that ranks start, such as the planner, are helpers. They have a group without a quota and with the
    least weight, so they run while ranks leave cores free.

    Raises:
        ValueError: neither version is mounted with its cpu controller.
    """

    def __init__(self, name: str, num_ranks: int, root: Path = Path("/sys/fs/cgroup")) -> None:
        if (root / "cpu" / "cgroup.procs").exists():
            self.is_v1, base = True, root / "cpu"
        elif (root / "cgroup.controllers").exists() and "cpu" in (root / "cgroup.controllers").read_text().split():
            self.is_v1, base = False, root
        else:
            raise ValueError(f"no control groups with a cpu controller under {root}: shares of cores need them")
        self.base, self.top = base, base / name
        self.folders = [self.top / str(rank) for rank in range(num_ranks)]
        self.helpers = self.top / "helpers"

    def create(self) -> None:
        """Create the groups without quotas."""
        if not self.is_v1:
            (self.base / "cgroup.subtree_control").write_text("+cpu")
        self.top.mkdir()
        if not self.is_v1:
            (self.top / "cgroup.subtree_control").write_text("+cpu")
        for folder in (*self.folders, self.helpers):
            folder.mkdir()
        name, least = ("cpu.shares", 2) if self.is_v1 else ("cpu.weight", 1)
        (self.helpers / name).write_text(str(least))

    def limit(self, cores: Sequence[float]) -> None:
        """Limit each rank to its share of a core."""
        for folder, share in zip(self.folders, cores, strict=True):
            quota = max(1000, round(share * PERIOD_US))
            if self.is_v1:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")

    def release_helpers(self, rank: int, pid: int) -> None:
        """Move the processes that a rank's process ``pid`` has started to the group of helpers."""
        for helper in self.processes(rank):
            if helper != pid:
                with contextlib.suppress(ProcessLookupError):
                    (self.helpers / "cgroup.procs").write_text(str(helper))

    def processes(self, rank: int) -> list[int]:
        """Return the processes of a rank."""
        return [int(pid) for pid in (self.folders[rank] / "cgroup.procs").read_text().split()]

    def remove(self) -> None:
        """Kill all processes in the groups and remove the groups, also groups of an earlier run with this name."""
        if not self.top.exists():
            return
        folders = [path for path in self.top.iterdir() if path.is_dir()]
        for folder in (*folders, self.top):
            _end_group(folder)
            folder.rmdir()


def _end_group(folder: Path) -> None:
    for _ in range(100):
        pids = (folder / "cgroup.procs").read_text().split()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
