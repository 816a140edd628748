"""Folders that a command writes either completely or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder, which gets its final name at the end and is removed after an error.

    It replaces the remains of a killed process. Raises ValueError if ``folder`` exists.
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
