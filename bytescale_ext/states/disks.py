"""Checks of the folder that pages go to, before training: a local disk, writable, not in use, and what it has free."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import psutil

from bytescale_ext.states.page_file import PATTERN, check_replaceable, is_in_use

IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
DISTANT: Final = frozenset(
    "9p afs beegfs ceph cifs glusterfs gpfs lustre nfs nfs4 orangefs panfs pvfs2 smb3 smbfs virtiofs wekafs".split()
)
_LOCAL_FUSE: Final = "fuse.fuse-overlayfs"


def check_disk(folder: Path, rank: int, flag: str) -> None:
    """Raise ValueError, naming the flag, for what is no writable folder of a local disk, or has files in use.

    ``rank``: of the process, whose files of an earlier run are replaced.
    """
    if not folder.is_dir():
        raise ValueError(f"{flag} {folder} is not a folder: make it on a local disk")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {folder} is not writable")
    kind = file_system_of(folder)
    if kind in IN_MEMORY:
        raise ValueError(f"{flag} {folder} is {kind}, which is host memory: give a folder of a local disk")
    if kind in DISTANT or (kind.startswith("fuse.") and kind != _LOCAL_FUSE):
        raise ValueError(f"{flag} {folder} is on {kind}, a file system over a network: give a folder of a local disk")
    for path in sorted(folder.glob(PATTERN.replace("*", f"{rank:05}-*"))):
        check_replaceable(path)


def file_system_of(folder: Path) -> str:
    """Return the type of the file system that a folder is on, "" where that is not known."""
    place = folder.resolve()
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    return next((mounts[one] for one in (place, *place.parents) if one in mounts), "")


def free_disk_bytes(folder: Path) -> int:
    """Return what the disk of a folder has free, with the pages that dead processes have left there."""
    left = sum(path.stat().st_size for path in folder.glob(PATTERN) if not is_in_use(path))
    return shutil.disk_usage(folder).free + left
