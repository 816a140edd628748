"""Runs: files of sorted records that tasks exchange. A task reads the range of each run that it is responsible for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bytescale_ext.new_file import new_file


def save_array(path: Path, values: np.ndarray) -> None:
    """Write an array [n] to a temporary file, and rename it when it is complete. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path, is_binary=True) as stream:
        np.save(stream, values)


def new_mapped(path: Path, dtype: np.dtype, size: int) -> np.ndarray:
    """Return a memory map of a new file of zeros, which replaces ``path`` and can be written: [size]."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (size,)}
    with new_file(path, is_binary=True) as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        stream.truncate(stream.tell() + size * dtype.itemsize)
    values: np.ndarray = np.load(path, mmap_mode="r+", allow_pickle=False)
    return values


def mapped(path: Path) -> np.ndarray:
    """Return a memory map of a saved array: [n]."""
    values: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return values


def rows_between(paths: Iterable[Path], field: str, begin: int, end: int) -> list[np.ndarray]:
    """Return a copy of the records, [n] of each run, whose ``field`` is in [begin, end). Runs are sorted by it."""
    parts = []
    for path in paths:
        records = mapped(path)
        first, last = (bisect_left(records, limit, key=lambda row: int(row[field])) for limit in (begin, end))
        parts.append(np.array(records[first:last]))
    return parts


def sorted_by(records: np.ndarray, fields: Sequence[str]) -> np.ndarray:
    """Return records [n] sorted by the first field, records with equal values by the second, and so on."""
    ordered: np.ndarray = records[np.lexsort([records[name] for name in reversed(fields)])]
    return ordered


def hash_range(task: int, tasks: int) -> tuple[int, int]:
    """Return the bounds [begin, end) of a task's part of the 64-bit hashes."""
    return (task << 64) // tasks, ((task + 1) << 64) // tasks


def joined(parts: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Return arrays [n] of this type end to end: [sum of n]; empty without arrays."""
    return np.concatenate([np.empty(0, dtype), *parts])
