"""Files with results of scans of ``.idx`` files: one process scans, and all others map the result.

A file is an array of int64 in NumPy's format. Its first three numbers are the version of the format, and the size and
the modification time of the ``.idx`` file: the scan of another ``.idx`` file is made again. Small ``.idx`` files are
scanned by every process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from bytescale_ext.data.samples.idx_file import DocumentIndex
from bytescale_ext.json_input import check_stored
from bytescale_ext.new_file import locked_folder, new_file

FILE_LIMIT: Final = 1 << 20
"""Most documents of an ``.idx`` file that every process scans."""

_VERSION = 1
_HEAD = 3


def scanned(
    index: DocumentIndex,
    name: str,
    cache: Path | None,
    scan: Callable[[], np.ndarray],
    is_valid: Callable[[np.ndarray], bool],
) -> np.ndarray:
    """Return the result of a scan, int64 [n], from its file if there is one.

    One process at a time scans and writes the file; processes that wait for it read the file. If the folder cannot be
    written, each process scans. No communication.

    Args:
        index: index that is scanned.
        name: name of the result.
        cache: folder of the files; None: the folder ``cache`` below the path of the data set.
        scan: function that returns the result.
        is_valid: whether a result that was read from a file can belong to the index.

    Raises:
        ValueError: the error of ``scan``.
    """
    if index.num_documents <= FILE_LIMIT:
        return scan()
    path = _path(index, name, cache)
    with contextlib.ExitStack() as stack:
        values = _mapped(path, index)
        if values is not None and is_valid(values):
            return values
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked_folder(path.parent))
        values = _mapped(path, index)  # another process may have written it meanwhile
        if values is not None and is_valid(values):
            return values
        values = scan()
        try:
            with new_file(path, is_binary=True) as stream:
                np.save(stream, np.concatenate([_head(index), values]))
        except OSError:
            return values
        mapped = _mapped(path, index)
        return values if mapped is None else mapped


def _path(index: DocumentIndex, name: str, cache: Path | None) -> Path:
    prefix = Path(index.path.removesuffix(".idx"))
    if cache is None:
        return prefix / "cache" / "bytescale" / f"{name}.npy"
    place = hashlib.blake2b(os.fsencode(prefix.absolute()), digest_size=8).hexdigest()
    return Path(cache) / f"bytescale-{place}-{name}.npy"


def _head(index: DocumentIndex) -> np.ndarray:
    return np.array([_VERSION, *index.identity], dtype=np.int64)


def _mapped(path: Path, index: DocumentIndex) -> np.ndarray | None:
    """Return the result in a file, mapped into memory; None without a file, or for a file of another index."""
    try:
        check_stored(path)
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception:  # numpy evaluates the header, which fails in many ways
        return None
    is_array = isinstance(values, np.ndarray) and values.dtype == np.int64 and values.ndim == 1
    if not is_array or not np.array_equal(values[:_HEAD], _head(index)):
        return None
    return np.asarray(values[_HEAD:])
