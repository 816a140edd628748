"""Lengths of samples, as values that another process of the machine can read: paths and settings instead of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol, overload, runtime_checkable

import numpy as np

from bytescale_ext.data.samples.document_samples import DocumentSamples, open_samples
from bytescale_ext.data.samples.epochs import KeyedOrder
from bytescale_ext.plan.step.numbers import Numbers

_OPEN_FILES = 4096  # data sets of a blend that a process keeps open


class LengthReader(Protocol):
    """A value of few bytes that finds the lengths of samples. Another process finds the same lengths."""

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the tokens of samples [n]: int64 [n].

        Raises:
            ValueError: a file has changed.
        """
        ...


@runtime_checkable
class ReadableSource(Protocol):
    """A ``TokenSource`` whose lengths another process may be able to read."""

    def length_reader(self) -> LengthReader | None:
        """Return the reader of the lengths of all samples, or None if only this process knows them."""
        ...


@dataclass(frozen=True, slots=True)
class FileLengths:
    """Lengths of the samples of the documents [begin, end) of a data set, in the keyed order of its epochs.

    Attributes:
        prefix: path of the data set.
        seq_length: tokens of the longest sample.
        cache: folder of the index cache, see ``check_indexed_dataset``.
        begin, end: the documents.
        identity: size and modification time of the ``.idx`` file.
        order: row of each sample.
    """

    prefix: str
    seq_length: int
    cache: Path | None
    begin: int
    end: int
    identity: tuple[int, int]
    order: KeyedOrder

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the tokens of samples [n]: int64 [n]; see ``LengthReader``."""
        rows = _opened(self.prefix, self.seq_length, self.cache, self.begin, self.end)
        if rows.index.identity != self.identity:
            raise ValueError(f"{rows.index.path}: changed while it was read: start the run again")
        return rows.lengths(self.order.rows(samples))


@dataclass(frozen=True, slots=True)
class BlendLengths:
    """Lengths of the samples of a blend, whose lists are in files.

    Attributes:
        parts: data sets of the blend.
        dataset_index: file with the data set of each sample, an array of integers in NumPy's format.
        sample_index: file with the number of each sample in its data set.
    """

    parts: tuple[FileLengths, ...]
    dataset_index: Path
    sample_index: Path

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the tokens of samples [n]: int64 [n]; see ``LengthReader``."""
        return lengths_in_blend(self.parts, _mapped(self.dataset_index), _mapped(self.sample_index), samples)


def lengths_in_blend(
    parts: Sequence[LengthReader], dataset_index: np.ndarray, sample_index: np.ndarray, samples: np.ndarray
) -> np.ndarray:
    """Return the tokens of samples [n] of a blend: int64 [n].

    Args:
        parts: data sets of the blend.
        dataset_index: data set of each sample of the blend: [samples].
        sample_index: number of each sample in its data set: [samples].
        samples: the wanted samples.
    """
    datasets, inner = dataset_index[samples], sample_index[samples]
    lengths = np.empty(len(samples), dtype=np.int64)
    for number, part in enumerate(parts):
        places = np.flatnonzero(datasets == number)
        lengths[places] = part.lengths(inner[places])
    return lengths


class StepLengths(Sequence[int]):
    """Lengths of the sequences of a step. The process that plans reads them.

    Attributes:
        reader: reader of the lengths.
        samples: the samples, one for each sequence.
    """

    def __init__(self, reader: LengthReader, samples: Sequence[int]) -> None:
        self.reader, self.samples = reader, samples if isinstance(samples, Numbers) else Numbers(samples)

    @cached_property
    def numbers(self) -> Numbers:
        """The lengths, which this process reads now."""
        return Numbers(self.reader.lengths(self.samples.array))

    @property
    def is_read(self) -> bool:
        """Whether this process has read the lengths."""
        return "numbers" in self.__dict__

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.numbers[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __array__(self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return self.numbers.__array__(dtype, copy)

    def __reduce__(self) -> tuple[type[StepLengths], tuple[LengthReader, Numbers]]:
        return StepLengths, (self.reader, self.samples)


@lru_cache(maxsize=_OPEN_FILES)
def _opened(prefix: str, seq_length: int, cache: Path | None, begin: int, end: int) -> DocumentSamples:
    return open_samples(prefix, seq_length, cache).part(begin, end)


@lru_cache(maxsize=_OPEN_FILES)
def _mapped(path: Path) -> np.ndarray:
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
