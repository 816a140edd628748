"""Protects a process from files that others left for it: modules in the current folder, and compiled kernels."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Final

KERNELS: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable of torch: the folder of its compiled kernels, whose pickles and libraries it loads."""


def protect_process() -> None:
    """Set the environment of this process and of the processes that it starts, before torch is imported.

    - Python does not look for modules in the current folder. ``multiprocessing`` starts processes that would.
    - torch does not load kernels that another user compiled. It looks for them under a name that anybody can guess, in
      the temporary folder that all users share. If that folder is not this user's, a folder below the home is taken.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    if KERNELS in os.environ:
        return
    try:
        name = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())  # as torch writes it
        folder = Path(tempfile.gettempdir(), f"torchinductor_{name}")
        if not is_private(folder):
            os.environ[KERNELS] = str(Path.home() / ".cache" / "bytescale" / "kernels")
    except (OSError, KeyError, RuntimeError):  # no user, no home or no temporary folder: torch says so if it compiles
        return


def is_private(folder: Path) -> bool:
    """Return whether a folder is this user's and others cannot write to it. It is created if it is missing."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
