"""Windows in a file: ``NAME.windows.npy``, the table, beside ``NAME.windows.json``, what it was made from.

The second file holds hashes of the table and of the data set's ``.idx``, so that windows of another data set are
refused before training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bytescale_ext.data.samples.lengths import check_indexed_dataset
from bytescale_ext.plan.sculpt.pieces import ROW

SUFFIX: Final = ".windows.npy"
_VERSION: Final = 1
_AGAIN: Final = "make the windows again with bytescale data sculpt"


@dataclass(frozen=True, slots=True)
class WindowsHeader:
    """What a table of windows was made from, and how.

    Attributes:
        context: the most tokens of a window.
        overflow: what happened to ends without room.
        seed: of the clusters.
        idx_sha256: hash of the ``.idx`` file of the documents.
        table_sha256: hash of the ``.npy`` file.
        version: of this format.
    """

    context: int
    overflow: str
    seed: int
    idx_sha256: str
    table_sha256: str = ""
    version: int = _VERSION


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def header_path(path: Path) -> Path:
    """Return the path of the header of a table. Raises ValueError unless its name ends with ``SUFFIX``."""
    if not path.name.endswith(SUFFIX):
        raise ValueError(f"{path}: give the file of bytescale data sculpt whose name ends with {SUFFIX}")
    return path.with_suffix(".json")


def save_windows(path: Path, table: np.ndarray, header: WindowsHeader) -> None:
    """Write a table of windows [rows] and its header; each gets its name once it is whole, the table last."""
    described = header_path(path)
    partial = {
        path: path.with_name(f".{path.name}.partial"),
        described: described.with_name(f".{described.name}.partial"),
    }
    try:
        with partial[path].open("wb") as stream:
            np.save(stream, table)
        whole = dataclasses.replace(header, table_sha256=sha256_of(partial[path]))
        partial[described].write_text(json.dumps(dataclasses.asdict(whole), indent=2) + "\n", encoding="utf-8")
        path.unlink(missing_ok=True)  # so that an old table never stands beside a new header
        os.replace(partial[described], described)
        os.replace(partial[path], path)
    finally:
        for one in partial.values():
            one.unlink(missing_ok=True)


def load_windows(path: Path) -> tuple[np.ndarray, WindowsHeader]:
    """Return a table of windows [rows], mapped from its file, and its header.

    Raises:
        ValueError: a file is missing, damaged, of another format, or does not belong to the other.
    """
    described = header_path(path)
    try:
        values = json.loads(described.read_text(encoding="utf-8"))
        header = WindowsHeader(**values)
    except OSError as error:
        raise ValueError(f"{described}: {error.strerror}: {_AGAIN}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{described}: not the header of windows ({error}): {_AGAIN}") from error
    if header.version != _VERSION:
        raise ValueError(f"{described}: version {header.version}, only version {_VERSION} is read: {_AGAIN}")
    try:
        is_same = sha256_of(path) == header.table_sha256
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: {_AGAIN}") from error
    if not is_same:
        raise ValueError(f"{path} is not the table that {described.name} describes: {_AGAIN}")
    table: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    if table.dtype != ROW or not len(table):
        raise ValueError(f"{path}: not a table of windows: {_AGAIN}")
    return table, header


def files_of_data_sets(files: Sequence[Path], prefixes: Sequence[str]) -> dict[str, tuple[Path, WindowsHeader]]:
    """Return the file of windows, and its header, of each data set, found by the hash of the data set's index.

    Raises:
        ValueError: a data set has no file or several, a file is of none of them, or a file is missing or damaged.
    """
    headers = {path: load_windows(path)[1] for path in files}
    found: dict[str, tuple[Path, WindowsHeader]] = {}
    for prefix in prefixes:
        check_indexed_dataset(prefix)
        digest = sha256_of(prefix + ".idx")
        of_prefix = [path for path, header in headers.items() if header.idx_sha256 == digest]
        if len(of_prefix) != 1:
            told = "no file of windows is of" if not of_prefix else f"{len(of_prefix)} files of windows are of"
            raise ValueError(
                f"{', '.join(map(str, files))}: {told} the data set {prefix}: give one that bytescale data sculpt "
                f"--input {prefix} has made"
            )
        found[prefix] = of_prefix[0], headers[of_prefix[0]]
    unused = headers.keys() - {path for path, _ in found.values()}
    if unused:
        raise ValueError(f"{min(unused)}: windows of a data set that is not in the data path: leave them out")
    return found
