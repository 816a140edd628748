"""Free memory of the machine, limited by the control groups of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from bytescale_ext.json_input import lines_of_text

# Files of a control group, for versions 2 and 1: memory limit, memory usage, and the key in memory.stat of cached file
# pages, which the kernel reclaims first.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the free bytes of the machine, or of this process's tightest control group if that has less.

    Containers and SLURM jobs get less memory than the machine reports.

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    return max(0, min([_available(root), *_free_in_groups(root)]))


def local_processes() -> int:
    """Return the processes of the run on this machine, by torchrun's LOCAL_WORLD_SIZE."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _available(root: Path) -> int:
    """Return the kernel's estimate of the memory that a new process can use without swapping, in bytes."""
    lines = lines_of_text((root / "proc/meminfo").read_text())
    amounts = {name: amount.split() for name, _, amount in (line.partition(":") for line in lines)}
    return int(amounts["MemAvailable"][0]) * 1024  # the file counts in KiB


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yield the free bytes of each control group of this process and of the parent groups."""
    try:
        lines = lines_of_text((root / "proc/self/cgroup").read_text())
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = PurePosixPath(path)
        for folder in (group, *group.parents):
            yield from _free_in_group(mounted / folder.relative_to("/"))


def _free_in_group(folder: Path) -> Iterator[int]:
    for limit_file, used_file, cached in _FILES:
        try:
            limit, used = (folder / limit_file).read_text().strip(), int((folder / used_file).read_text())
            stat = dict(line.split() for line in lines_of_text((folder / "memory.stat").read_text()))
        except (OSError, ValueError):  # the other version, or a group without memory control
            continue
        if limit != "max":
            yield int(limit) - used + int(stat.get(cached, 0))
