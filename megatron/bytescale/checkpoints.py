"""Resumes from the last complete checkpoint, because a host failure or a full disk may leave truncated files.

Megatron names a checkpoint in its tracker file after all ranks have written their parts. So a run that is killed during
a save resumes from the previous checkpoint. But the system may still lose data that it has not yet written to disk, and
with an empty tracker file Megatron exits with code 0 without training.

Loading a checkpoint unpickles parts of it. ``check_classes`` runs before anything else reads a checkpoint, and refuses
classes that no checkpoint needs. It reads metadata and pickled objects, and no tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.errors import one_line
from bytescale_ext.json_input import json_value, stored_bytes
from bytescale_ext.new_file import new_file
from bytescale_ext.pickles import FileSlice, UntrustedClass, check_archive, check_pickle
from megatron.bytescale.launch import TRACKER

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata

RELEASE = "release"  # Megatron's name for a checkpoint without an iteration, to start a training from

_FOLDER = "iter_{:07d}"
_SHARDED = ".metadata"  # in all formats of torch.distributed.checkpoint
_WRITTEN_LAST = "metadata.json"
_WRITTEN_BY_NAME = (TRACKER, "progress.txt", "non_persistent")  # the last is a folder of checkpoints
_UNSAFE_LOAD, _SAFE_LOAD = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # for torch.load
_ITERATION = re.compile("[0-9]{1,15}")


@dataclass
class _Trust:
    """Whether the user of this process trusts the pickles in checkpoints (``--trust-checkpoint``)."""

    is_given: bool = False


_TRUST = _Trust()


def trust_checkpoints(trusts: bool) -> None:
    """Let this process load any class from checkpoints, or only allowed classes, whatever the environment says."""
    _TRUST.is_given = trusts
    for name in (_UNSAFE_LOAD, _SAFE_LOAD):
        os.environ.pop(name, None)
    if trusts:
        os.environ[_UNSAFE_LOAD] = "1"


def use_last_whole(load: Path, wanted: int | None = None) -> str | None:
    """Make the tracker file of a checkpoint folder name the last complete checkpoint; return a warning if it did not.

    Only one process may call it, before any process reads the tracker file.

    Args:
        load: folder of ``--load``; without a tracker file there, a new run starts.
        wanted: iteration of ``--ckpt-step``; no other checkpoint is accepted.

    Raises:
        ValueError: no checkpoint or not the wanted checkpoint is complete, the tracker file cannot be written, or a
        checkpoint needs a class that is not allowed.
    """
    tracker = load / TRACKER
    if wanted is None and not tracker.exists() and (whole := _whole(load)):
        return (
            f"WARNING: {load} holds checkpoints ({', '.join(map(str, whole))}) and no {TRACKER}: the run starts anew; "
            f"write {whole[0]} into that file to resume"
        )
    if wanted is not None:
        if flaw := flaw_of(load, wanted):
            raise ValueError(f"--ckpt-step {wanted}: {flaw}; {_whole_text(load)}")
        return None
    named = _named(load) if tracker.is_file() else RELEASE
    if named == RELEASE:
        return None
    flaw = flaw_of(load, int(named)) if named else f"{tracker} names no iteration"
    if not flaw:
        return None
    latest = int(named) if named else None
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
    return sorted((int(number) for number in numbers if _ITERATION.fullmatch(number)), reverse=True)


def step_of(folder: Path) -> int | None:
    """Return the iteration of the checkpoint in a folder of one checkpoint; None for other folders."""
    named = folder.name.removeprefix("iter_")
    is_one = folder.name.startswith("iter_") and _ITERATION.fullmatch(named) and not (folder / TRACKER).exists()
    return int(named) if is_one and not next(_flaws(folder), "") else None


def flaw_of(load: Path, iteration: int) -> str:
    """Return evidence that a checkpoint is incomplete, or "" without evidence. Reads no tensors.

    Raises ValueError if its metadata need a class that is not allowed.
    """
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
    try:
        json_value(stored_bytes(folder / _WRITTEN_LAST))
    except (OSError, ValueError):
        yield f"{folder / _WRITTEN_LAST} is missing or cut short"
    try:
        parts = read_metadata(folder / _SHARDED).storage_data.values()
    except UntrustedClass:
        raise
    except ValueError as error:
        yield str(error)
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
    named = str(wanted) if wanted is not None else _named(load)
    folder = load / (named if named == RELEASE else _FOLDER.format(int(named or -1)))
    return folder if named and folder.is_dir() else None


def links_to_overwrite(save: Path) -> Iterator[Path]:
    """Yield the links in ``save`` whose targets a save of Megatron would overwrite.

    These are the paths that every save uses, and all in folders of later iterations than the tracker file names.
    """
    yield from _links_by_name(save)
    named = _named(save)
    latest = int(named) if named and named != RELEASE else -1
    for folder in save.glob("iter_*"):
        iteration = folder.name.removeprefix("iter_")
        if _ITERATION.fullmatch(iteration) and int(iteration) > latest:
            yield from _links_at(folder)


def remove_links(save: Path, iteration: int) -> list[Path]:
    """Remove and return the links whose targets the save of an iteration would overwrite. Keeps their targets.

    Megatron opens its files by name, so others who can write in ``save`` could plant links during a training.
    """
    links = [*_links_by_name(save), *_links_at(save / _FOLDER.format(iteration))]
    for link in links:
        link.unlink(missing_ok=True)
    return links


def _links_by_name(save: Path) -> list[Path]:
    return [path for name in _WRITTEN_BY_NAME if (path := save / name).is_symlink()]


def _links_at(path: Path) -> Iterator[Path]:
    """Yield a path if it is a link, otherwise the links below it."""
    inside = () if path.is_symlink() else path.rglob("*")
    yield from (each for each in (path, *inside) if each.is_symlink())


def is_sharded(folder: Path) -> bool:
    """Return whether a checkpoint has a format of ``torch.distributed.checkpoint``, such as torch_dist."""
    return (folder / _SHARDED).is_file()


def sharded_at(flag: str, load: Path) -> Path:
    """Return the folder of the last checkpoint in ``load``, the value of a flag. Reads no tensors and no metadata.

    Raises ValueError if there is no checkpoint of ``--ckpt-format torch_dist``.
    """
    checkpoint = to_load(load)
    if checkpoint is None:
        raise ValueError(f"{flag} {load}: there is no checkpoint")
    if not is_sharded(checkpoint):
        raise ValueError(f"{flag} {checkpoint}: only checkpoints of --ckpt-format torch_dist can be read")
    return checkpoint


def _named(load: Path) -> str:
    """Return what the tracker file of a folder names: digits, "release", or "" for anything else."""
    if not (load / TRACKER).is_file():  # opening a pipe would wait for ever
        return ""
    try:
        with (load / TRACKER).open("rb") as file:
            named = file.read(100).decode("ascii", "replace").strip()
    except OSError:
        return ""
    return named if named == RELEASE or _ITERATION.fullmatch(named) else ""


def names_in(folder: Path) -> list[str]:
    """Return the tensor names in a sharded checkpoint. Raises ValueError if its metadata cannot be read."""
    return list(read_metadata(folder / _SHARDED).state_dict_metadata)


def elements_in(folder: Path) -> int:
    """Return the number of elements in all tensors of a sharded checkpoint. Raises ValueError as ``names_in``."""
    entries = read_metadata(folder / _SHARDED).state_dict_metadata.values()
    return sum(math.prod(getattr(entry, "size", (0,))) for entry in entries)


def read_metadata(path: Path) -> Metadata:
    """Read the metadata file of a sharded checkpoint.

    Raises:
        UntrustedClass: the file needs a class that is not allowed, and the process does not trust checkpoints.
        ValueError: the file cannot be read, or describes more than its checkpoint can hold.
    """
    try:
        data = stored_bytes(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    try:
        if not _TRUST.is_given:
            check_pickle(data)
        metadata: Metadata = pickle.loads(data)
        _check_metadata(metadata)
    except UntrustedClass as error:
        raise UntrustedClass(_untrusted(path, error)) from None
    except Exception as error:  # damaged fields fail in many ways
        raise ValueError(f"{path} cannot be read ({one_line(error, 100)})") from None
    return metadata


def _untrusted(path: Path, error: UntrustedClass) -> str:
    return f"{path} needs {error}, and loading it could run code; with --trust-checkpoint it is loaded"


def _check_metadata(metadata: Metadata) -> None:
    """Raise ValueError for metadata with fields of other types, or with tensors larger than their stored parts."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    stored: dict[str, int] = {}
    places = {(index.fqn, None if index.offset is None else tuple(index.offset)) for index in metadata.storage_data}
    for index, part in metadata.storage_data.items():
        if part.offset < 0 or part.length < 0 or Path(part.relative_path).name != part.relative_path:
            raise ValueError(f"part {str(index.fqn)[:40]!r} is outside the checkpoint")
        if getattr(part, "transform_descriptors", None):
            raise ValueError(f"part {str(index.fqn)[:40]!r} is compressed")
        stored[index.fqn] = stored.get(index.fqn, 0) + part.length
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise ValueError("a tensor has no name")
        if isinstance(entry, TensorStorageMetadata):
            needed = math.prod(entry.size) * entry.properties.dtype.itemsize
            if needed > stored.get(name, 0):
                raise ValueError(f"tensor {name[:40]!r} needs {needed:,} bytes of {stored.get(name, 0):,}")
            for chunk in entry.chunks:
                ends = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
                if not all(0 <= first <= first + number <= most for first, number, most in ends):
                    raise ValueError(f"tensor {name[:40]!r} has a part outside it")
                if (name, tuple(chunk.offsets)) not in places:
                    raise ValueError(f"a part of tensor {name[:40]!r} is in no file")
        elif (name, None) not in places:
            raise ValueError(f"object {name[:40]!r} is in no file")


@dataclass(frozen=True)
class LoadedCheckpoints:
    """Megatron's flags of the checkpoints that a training loads, under the names of its arguments."""

    load: str | None
    pretrained_checkpoint: str | None
    non_persistent_global_ckpt_dir: str | None
    ckpt_step: int | None
    enable_msc: bool

    def parents(self) -> Iterator[tuple[str, Path]]:
        """Yield (flag, folder of checkpoints) for each folder that Megatron may load from."""
        if self.load is not None:
            yield "--load", Path(self.load)
            yield "--load", Path(self.load) / "non_persistent"
        if self.pretrained_checkpoint is not None:
            yield "--pretrained-checkpoint", Path(self.pretrained_checkpoint)
        if self.non_persistent_global_ckpt_dir is not None:
            yield "--non-persistent-global-ckpt-dir", Path(self.non_persistent_global_ckpt_dir)

    def folders(self) -> Iterator[tuple[str, Path]]:
        """Yield (flag, folder of one checkpoint) for each checkpoint that Megatron may load."""
        for flag, parent in self.parents():
            for step in dict.fromkeys((None, self.ckpt_step)):  # Megatron prefers "release" to --ckpt-step
                folder = to_load(parent, step)
                if folder is not None:
                    yield flag, folder


def check_loaded(checkpoints: LoadedCheckpoints, share: tuple[int, int], is_repaired: bool) -> None:
    """Check the classes in all checkpoints that a training may load, before Megatron reads them.

    All ranks must call it before they join a process group: no rank loads what another rank has not yet checked.

    Args:
        checkpoints: folders of the checkpoints.
        share: (rank, number of ranks) that divide the objects among them.
        is_repaired: whether another rank calls ``use_last_whole``, so that damage is no reason to stop.

    Raises:
        ValueError: a class is not allowed, a checkpoint is damaged or cannot be checked, or a tracker file names none.
    """
    if _TRUST.is_given:
        return
    if checkpoints.enable_msc and "://" in f"{checkpoints.load} {checkpoints.pretrained_checkpoint}":
        raise ValueError("--enable-msc: remote checkpoints cannot be checked; trust them with --trust-checkpoint")
    for flag, parent in checkpoints.parents():
        if (parent / TRACKER).is_file() and not _named(parent) and not is_repaired:
            raise ValueError(f"{flag} {parent / TRACKER} names no iteration")
    for flag, folder in checkpoints.folders():
        try:
            check_classes(folder, share)
        except UntrustedClass as error:
            raise ValueError(f"{flag} {error}") from None
        except ValueError as error:
            if not is_repaired:
                raise ValueError(f"{flag} {error}") from None


def check_classes(folder: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Check the classes of everything pickled in a checkpoint before it is loaded, unless the user trusts it.

    Reads no tensors.

    Args:
        folder: folder of one checkpoint.
        share: (rank, number of ranks) that divide the objects among them; all ranks check the metadata.

    Raises:
        UntrustedClass: something needs a class that is not allowed.
        ValueError: something is damaged.
    """
    if _TRUST.is_given:
        return
    paths = sorted(folder.rglob("*"))
    for path in paths:
        _check_no_pipe(path)
    archives = [(path, 0, path.stat().st_size) for path in paths if path.suffix == ".pt" and path.is_file()]
    for path in paths:
        if path.name.endswith(_SHARDED):  # without global metadata, torch reads the metadata of a rank
            archives += [(folder / part.relative_path, part.offset, part.length) for part in _objects(path)]
    rank, ranks = share
    for archive in archives[rank::ranks]:
        _check_classes_in(*archive)


def _check_classes_in(path: Path, offset: int, length: int) -> None:
    """Check the classes of one pickled object in a file; raises errors as ``check_classes``."""
    _check_no_pipe(path)
    try:
        with path.open("rb") as file:
            check_archive(FileSlice(file, offset, length))
    except UntrustedClass as error:
        raise UntrustedClass(_untrusted(path, error)) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error})") from None


def _check_no_pipe(path: Path) -> None:
    """Raise ValueError for a pipe or a device: reading it could wait for ever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} cannot be read (it is no file)")


def arguments_in(folder: Path) -> argparse.Namespace | None:
    """Return the training arguments in a sharded checkpoint; None if it holds none.

    ``check_classes`` divides objects among ranks, so the object with the arguments is checked here again.

    Raises:
        UntrustedClass: the object needs a class that is not allowed, and the process does not trust checkpoints.
        ValueError: the object cannot be read.
    """
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    with one_line_if_damaged(folder):
        if not _TRUST.is_given:
            for archive in _common_state(folder):
                _check_classes_in(*archive)
        state = load_common_state_dict(folder)
    args = state.get("args") if isinstance(state, dict) else None
    return args if isinstance(args, argparse.Namespace) else None


@contextlib.contextmanager
def one_line_if_damaged(folder: Path) -> Iterator[None]:
    """Turn the errors of Megatron and torch about a damaged checkpoint, which have many types, into a ValueError."""
    from torch.distributed.checkpoint.api import CheckpointException  # it does not derive from Exception

    try:
        yield
    except UntrustedClass:
        raise
    except (Exception, CheckpointException) as error:
        failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
        cause = failures[0][0] if failures else error
        reason = one_line(cause, 200) or type(cause).__name__
        raise ValueError(f"{folder} cannot be read ({reason})") from None


def _common_state(folder: Path) -> list[tuple[Path, int, int]]:
    """Return (file, offset, length) of the object that ``load_common_state_dict`` of Megatron unpickles."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

    path = folder / COMMON_STATE_FNAME  # of older versions of Megatron
    if path.exists():
        return [(path, 0, path.stat().st_size)]
    key = ShardedObject("common_state", None, (1,), (0,)).unique_key
    parts = read_metadata(folder / _SHARDED).storage_data
    return [
        (folder / part.relative_path, part.offset, part.length) for index, part in parts.items() if index.fqn == key
    ]


def _objects(path: Path) -> list[_StorageInfo]:
    """Return the places of the pickled objects of a sharded checkpoint; tensors are not unpickled freely."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = read_metadata(path)
    kinds = metadata.state_dict_metadata
    is_object = {name: not isinstance(entry, TensorStorageMetadata) for name, entry in kinds.items()}
    return [part for index, part in metadata.storage_data.items() if is_object.get(index.fqn, True)]


def _whole_text(load: Path) -> str:
    return f"whole in {load}: {', '.join(map(str, _whole(load))) or 'none'}"


def _whole(load: Path) -> list[int]:
    """Return the iterations of the complete checkpoints in a folder, latest first."""
    return [iteration for iteration in iterations(load) if not flaw_of(load, iteration)]


def _replace(path: Path, text: str) -> None:
    """Write a file atomically: it has either the old or the new content."""
    with new_file(path) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
