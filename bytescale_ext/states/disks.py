"""Checks of the folder for page files before training: local disk, writable, unused; and its free space."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

from bytescale_ext.json_input import lines_of_text
from bytescale_ext.states.page_file import PATTERN, check_replaceable, is_in_use

IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
DISTANT: Final = frozenset(
    "9p afs beegfs ceph cifs glusterfs gpfs lustre nfs nfs4 orangefs panfs pvfs2 smb3 smbfs virtiofs wekafs".split()
)
_LOCAL_FUSE: Final = "fuse.fuse-overlayfs"
MOUNTS: Final = Path("/proc/self/mounts")
"""Mounted file systems: device, folder, type and options, one mount a line (fstab(5))."""


def check_disk(folder: Path, rank: int, flag: str) -> None:
    """Raise ValueError unless a folder is writable, on a local disk, and its files of this rank can be replaced.

    Args:
        folder: folder for page files.
        rank: number of the process, which replaces its files of an earlier run.
        flag: flag that names the folder, for the error message.
    """
    if not folder.is_dir():
        raise ValueError(f"{flag} {folder} is not a folder: create it on a local disk")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {folder} is not writable")
    kind = file_system_of(folder)
    if kind in IN_MEMORY:
        raise ValueError(f"{flag} {folder} is {kind}, which is host memory: give a folder on a local disk")
    if kind in DISTANT or (kind.startswith("fuse.") and kind != _LOCAL_FUSE):
        raise ValueError(f"{flag} {folder} is on {kind}, a network file system: give a folder on a local disk")
    for path in sorted(folder.glob(PATTERN.replace("*", f"{rank:05}-*"))):
        check_replaceable(path)


def file_system_of(folder: Path) -> str:
    """Return the type of the file system of a folder, or "" if it is unknown."""
    path = folder.resolve()
    types = dict(_mount(line) for line in lines_of_text(MOUNTS.read_text()))
    return next((types[parent] for parent in (path, *path.parents) if parent in types), "")


def _mount(line: str) -> tuple[Path, str]:
    """Return folder and type of a mount. The file writes white space and backslashes as octal numbers."""
    _, folder, kind, *_ = line.split(" ")
    return Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), folder)), kind


def free_disk_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's disk, including page files that dead processes have left."""
    abandoned = sum(path.stat().st_size for path in folder.glob(PATTERN) if not is_in_use(path))
    return shutil.disk_usage(folder).free + abandoned
