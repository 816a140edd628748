"""Tuples of integers that are stored as arrays: a step of half a million documents has several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt


class Numbers(Sequence[int]):
    """An immutable sequence of integers that equals the tuple of the same integers. Numpy reads it without a copy.

    Iteration converts all numbers at once, which takes 10 ms for half a million; use ``array`` in code that runs in
    every step.

    Attributes:
        array: the numbers, read-only int64: [n].
    """

    __slots__ = ("_range", "array")
    array: npt.NDArray[np.int64]

    def __init__(self, values: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self._range = values if isinstance(values, range) else None  # pickled instead of the numbers
        if isinstance(values, range):  # numpy would read a range number by number
            values = np.arange(values.start, values.stop, values.step)
        array = np.asarray(values, dtype=np.int64).view()
        array.flags.writeable = False
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self.array[index].tolist())
        return int(self.array[index])

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
