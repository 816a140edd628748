"""Folders that a command writes: whole or not there."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write to, which gets its final name at the end, and is removed after an error.

    What a killed process has left of it is replaced. Raises ValueError where ``folder`` exists.
    """
    if folder.exists():
        raise ValueError(f"--output {folder}: it exists already")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
