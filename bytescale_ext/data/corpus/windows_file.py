"""Files of windows: the table ``NAME.windows.npy`` and its header ``NAME.windows.json``.

The header contains hashes of the table and of the data set's ``.idx``, so that windows of another data set are refused
before training.
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
from bytescale_ext.errors import one_line
from bytescale_ext.json_input import check_stored, json_settings, stored_text
from bytescale_ext.new_file import new_file, private_folder, write_text
from bytescale_ext.plan.sculpt.pieces import ROW

SUFFIX: Final = ".windows.npy"
ORDERS: Final = ("corpus", "related", "shuffled")
"""Orders of the documents in a window: of the data set; each next to similar documents; anew in each epoch."""

_VERSION: Final = 1
_AGAIN: Final = "make the windows again with bytescale data sculpt"


@dataclass(frozen=True, slots=True)
class WindowsHeader:
    """Header of a table of windows.

    Attributes:
        context: largest number of tokens of a window.
        overflow: treatment of document ends that do not fit.
        seed: seed of the clusters.
        idx_sha256: hash of the ``.idx`` file of the documents.
        table_sha256: hash of the ``.npy`` file.
        version: version of the format.
        order: order of the documents in a window, one of ``ORDERS``.
    """

    context: int
    overflow: str
    seed: int
    idx_sha256: str
    table_sha256: str = ""
    version: int = _VERSION
    order: str = ORDERS[0]


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def header_path(path: Path) -> Path:
    """Return the path of the header of a table. Raises ValueError unless its name ends with ``SUFFIX``."""
    if not path.name.endswith(SUFFIX):
        raise ValueError(f"{path}: give the file of bytescale data sculpt whose name ends with {SUFFIX}")
    return path.with_suffix(".json")


def save_windows(path: Path, table: np.ndarray, header: WindowsHeader) -> None:
    """Write a table of windows [rows] and its header. Each file is renamed when it is complete, the table last."""
    header_file = header_path(path)
    with private_folder(path.parent, path.name) as folder:
        with new_file(folder / path.name, is_binary=True) as stream:
            np.save(stream, table)
        whole = dataclasses.replace(header, table_sha256=sha256_of(folder / path.name))
        path.unlink(missing_ok=True)  # an old table must never have a new header
        write_text(header_file, json.dumps(dataclasses.asdict(whole), indent=2) + "\n")
        os.replace(folder / path.name, path)


def load_windows(path: Path) -> tuple[np.ndarray, WindowsHeader]:
    """Return a memory map of a table of windows, [rows], and its header.

    Raises:
        ValueError: a file is missing, damaged or in another format, or the two files do not match.
    """
    header_file = header_path(path)
    try:
        values = json_settings(stored_text(header_file))
        header = WindowsHeader(**values)
    except OSError as error:
        raise ValueError(f"{header_file}: {error.strerror}: {_AGAIN}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{header_file}: not the header of windows ({error}): {_AGAIN}") from error
    if header.version != _VERSION:
        raise ValueError(f"{header_file}: version {header.version}, only version {_VERSION} is supported: {_AGAIN}")
    try:
        check_stored(path)
        is_same = sha256_of(path) == header.table_sha256
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: {_AGAIN}") from error
    if not is_same:
        raise ValueError(f"{path} does not match its header {header_file.name}: {_AGAIN}")
    try:
        table: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy evaluates the header, which fails in many ways
        raise ValueError(f"{path}: not a table of windows ({one_line(error, 100)}): {_AGAIN}") from None
    if not isinstance(table, np.ndarray) or table.dtype != ROW or table.ndim != 1 or not len(table):
        raise ValueError(f"{path}: not a table of windows: {_AGAIN}")
    return table, header


def files_of_data_sets(files: Sequence[Path], prefixes: Sequence[str]) -> dict[str, tuple[Path, WindowsHeader]]:
    """Return (file of windows, header) of each data set, matched by the hash of the data set's index.

    Raises:
        ValueError: a data set does not have exactly one file, a file belongs to no data set, or a file is missing or
            damaged.
    """
    headers = {path: load_windows(path)[1] for path in files}
    by_prefix: dict[str, tuple[Path, WindowsHeader]] = {}
    for prefix in prefixes:
        check_indexed_dataset(prefix)
        digest = sha256_of(prefix + ".idx")
        matching = [path for path, header in headers.items() if header.idx_sha256 == digest]
        if len(matching) != 1:
            problem = "no file of windows belongs" if not matching else f"{len(matching)} files of windows belong"
            raise ValueError(
                f"{', '.join(map(str, files))}: {problem} to the data set {prefix}: give one file made by bytescale "
                f"data sculpt --input {prefix}"
            )
        by_prefix[prefix] = matching[0], headers[matching[0]]
    unused = headers.keys() - {path for path, _ in by_prefix.values()}
    if unused:
        raise ValueError(f"{min(unused)}: windows of a data set that is not in the data path: omit this file")
    return by_prefix
