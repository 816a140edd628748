"""Tuples of integers that are stored as arrays: a step of half a million documents has several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt


class Numbers(Sequence[int]):
    """An immutable sequence of integers that equals the tuple of the same integers. Numpy reads it without a copy.

    Iteration converts all numbers at once, which takes 10 ms for half a million; use ``array`` in code that runs in
    every step. The array of a range is made when it is first read: its new pages cost more than its numbers.
    """

    __slots__ = ("_array", "_range")

    def __init__(self, values: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self._range = values if isinstance(values, range) else None
        self._array = None if isinstance(values, range) else _read_only(values)

    @property
    def array(self) -> npt.NDArray[np.int64]:
        """The numbers, read-only int64: [n]."""
        if self._array is None:
            assert self._range is not None
            self._array = _read_only(np.arange(self._range.start, self._range.stop, self._range.step))
        return self._array

    def __len__(self) -> int:
        return len(self.array if self._range is None else self._range)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self.array[index].tolist())
        return int(self.array[index] if self._range is None else self._range[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbers):
            return self.array is other.array or np.array_equal(self.array, other.array)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype) if copy else np.asarray(self.array, dtype=dtype)

    def __reduce__(self) -> tuple[type[Numbers], tuple[npt.NDArray[np.int64] | range]]:
        return Numbers, (self.array if self._range is None else self._range,)


def _read_only(values: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a view of numbers as an array: [n]."""
    array = np.asarray(values, dtype=np.int64).view()
    array.flags.writeable = False
    return array
