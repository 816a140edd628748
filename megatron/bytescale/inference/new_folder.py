"""Folders that a command writes either completely or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder, which gets its final name at the end.

    After an error it is removed, and so are the parents that were created for it. It replaces the remains of a killed
    process. Raises ValueError if ``folder`` exists.
    """
    check_new(folder)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    created = [parent for parent in part.parents if not parent.exists()]
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process has written there
            for parent in created:
                parent.rmdir()
        raise


def check_new(folder: Path) -> None:
    """Raise ValueError if the folder of ``--output`` exists."""
    if folder.exists():
        raise ValueError(f"--output {folder}: it exists already")
