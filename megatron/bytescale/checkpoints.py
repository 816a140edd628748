"""Resumes from the last complete checkpoint, because a host failure or a full disk may leave truncated files.

Megatron names a checkpoint in its tracker file after all ranks have written their parts. So a run that is killed during
a save resumes from the previous checkpoint. But the system may still lose data that it has not yet written to disk, and
with an empty tracker file Megatron exits with code 0 without training.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

from megatron.bytescale.launch import TRACKER

_FOLDER = "iter_{:07d}"
_SHARDED = ".metadata"  # in all formats of torch.distributed.checkpoint
_WRITTEN_LAST = "metadata.json"


def use_last_whole(load: Path, wanted: int | None = None) -> str | None:
    """Make the tracker file of a checkpoint folder name the last complete checkpoint; return a warning if it did not.

    Only one process may call it, before any process reads the tracker file.

    Args:
        load: folder of ``--load``; without a tracker file there, a new run starts.
        wanted: iteration of ``--ckpt-step``; no other checkpoint is accepted.

    Raises:
        ValueError: no checkpoint or not the wanted checkpoint is complete, or the tracker file cannot be written.
    """
    tracker = load / TRACKER
    if wanted is not None:
        if flaw := flaw_of(load, wanted):
            raise ValueError(f"--ckpt-step {wanted}: {flaw}; {_whole_text(load)}")
        return None
    named = tracker.read_text().strip() if tracker.is_file() else "release"
    if named == "release":
        return None
    flaw = flaw_of(load, int(named)) if named.isdigit() else f"{tracker} names no iteration"
    if not flaw:
        return None
    latest = int(named) if named.isdigit() else None
    earlier = [iteration for iteration in iterations(load) if latest is None or iteration < latest]
    last = next((iteration for iteration in earlier if not flaw_of(load, iteration)), None)
    if last is None:
        raise ValueError(f"--load {load}: {flaw}, and no checkpoint before it is whole; remove {TRACKER} to start anew")
    try:
        _replace(tracker, str(last))
    except OSError as error:
        raise ValueError(f"--load {load}: {flaw}; write {last} into {tracker} ({error.strerror})") from None
    return f"WARNING: {flaw}; the run resumes from the last whole checkpoint, of iteration {last}"


def iterations(load: Path) -> list[int]:
    """Return the iterations of the checkpoints in a folder, complete or not, latest first."""
    numbers = (path.name.removeprefix("iter_") for path in load.glob("iter_*"))
    return sorted((int(number) for number in numbers if number.isdigit()), reverse=True)


def flaw_of(load: Path, iteration: int) -> str:
    """Return evidence that a checkpoint is incomplete, or "" without evidence. Reads no tensors."""
    folder = load / _FOLDER.format(iteration)
    return next(_flaws(folder), "")


def _flaws(folder: Path) -> Iterator[str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if not files:
        yield f"{folder} holds no checkpoint"
    for path in files:
        if path.suffix == ".pt" and not zipfile.is_zipfile(path):
            yield f"{path} is cut short"
    if any(path.suffix == ".distcp" or path.name == _SHARDED for path in files):
        yield from _flaws_of_shards(folder)


def _flaws_of_shards(folder: Path) -> Iterator[str]:
    """Yield the flaws of a sharded checkpoint; its metadata contain the minimum size of each file."""
    from torch.distributed.checkpoint import FileSystemReader

    try:
        json.loads((folder / _WRITTEN_LAST).read_text())
    except (OSError, ValueError):
        yield f"{folder / _WRITTEN_LAST} is missing or cut short"
    try:
        parts = FileSystemReader(folder).read_metadata().storage_data.values()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        yield f"{folder / _SHARDED} cannot be read ({type(error).__name__})"
        return
    ends: dict[str, int] = {}
    for part in parts:
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in sorted(ends.items()):
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size < end:
            yield f"{path} is cut short: {size:,} of {end:,} bytes"


def to_load(load: Path, wanted: int | None = None) -> Path | None:
    """Return the folder of the checkpoint that Megatron loads from ``load``, or None if there is none.

    ``wanted``: iteration of ``--ckpt-step``.
    """
    tracker = load / TRACKER
    named = str(wanted) if wanted is not None else tracker.read_text().strip() if tracker.is_file() else ""
    folder = load / (_FOLDER.format(int(named)) if named.isdigit() else named)
    return folder if named and folder.is_dir() else None


def names_in(folder: Path) -> list[str]:
    """Return the tensor names in a sharded checkpoint. Raises ValueError if its metadata cannot be read."""
    from torch.distributed.checkpoint import FileSystemReader

    try:
        return list(FileSystemReader(folder).read_metadata().state_dict_metadata)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder}: {_SHARDED} cannot be read ({type(error).__name__})") from None


def _whole_text(load: Path) -> str:
    whole = [str(iteration) for iteration in iterations(load) if not flaw_of(load, iteration)]
    return f"whole in {load}: {', '.join(whole) or 'none'}"


def _replace(path: Path, text: str) -> None:
    """Write a file atomically: it has either the old or the new content."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
