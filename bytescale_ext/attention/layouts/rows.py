"""Rows of a tensor (``Rows``), a tensor in parts (``RowParts``) and offsets of packed documents (``CuSeqlens``).

``Rows`` reads, writes and adds to the rows of one interval without a copy. ``Rows`` and ``CuSeqlens`` copy their data
to a device once and without a sync.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a tensor in ascending order, made by ``Rows.of``.

    The rows of one interval are read as a view, which costs nothing. The rows of several intervals are gathered by an
    index, which is made once per device.

    Attributes:
        intervals: intervals ``(start, stop)`` in ascending order, none of them empty or adjacent to another.
    """

    intervals: tuple[tuple[int, int], ...]
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, intervals: Iterable[tuple[int, int]]) -> Rows:
        """Return the rows of ascending intervals. Empty intervals are dropped and adjacent intervals are joined."""
        joined: list[tuple[int, int]] = []
        for start, stop in intervals:
            if start == stop:
                continue
            assert start < stop and (not joined or joined[-1][1] <= start), f"{joined=} {start=} {stop=}"
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        return cls(tuple(joined))

    @property
    def num_rows(self) -> int:
        return sum(stop - start for start, stop in self.intervals)

    @property
    def is_view(self) -> bool:
        """Whether ``take`` returns a view."""
        return len(self.intervals) <= 1

    def take(self, tensor: torch.Tensor | RowParts, dim: int = 0) -> torch.Tensor:
        """Return these rows of a tensor: a view if they are one interval (of one part), else a copy.

        Args:
            tensor: tensor of any shape and dtype, with rows along ``dim``.
            dim: dimension of the rows; 0 for a tensor in parts.

        Returns:
            The same shape with ``num_rows`` rows along ``dim``.
        """
        if isinstance(tensor, RowParts):
            return tensor.take(self)
        if self.is_view:
            start, stop = self.intervals[0] if self.intervals else (0, 0)
            whole = start == 0 and stop == tensor.shape[dim]
            return tensor if whole else tensor.narrow(dim, start, stop - start)
        return tensor.index_select(dim, self.index(tensor.device))

    def put_(self, tensor: torch.Tensor | RowParts, values: torch.Tensor, dim: int = 0) -> None:
        """Write ``values`` (the shape that ``take`` returns, any dtype) to these rows of a tensor."""
        if isinstance(tensor, RowParts):
            for view, part in tensor.matched(self, values):
                view.copy_(part)
        elif self.is_view:
            self.take(tensor, dim).copy_(values)
        else:
            tensor.index_copy_(dim, self.index(tensor.device), values.to(tensor.dtype))

    def add_(self, tensor: torch.Tensor | RowParts, values: torch.Tensor, dim: int = 0) -> None:
        """Add ``values`` (the shape that ``take`` returns, any dtype) to these rows of a tensor.

        The result is deterministic, because no row occurs twice.
        """
        if isinstance(tensor, RowParts):
            tensor.add_(self, values)
        elif self.is_view:
            self.take(tensor, dim).add_(values)
        else:
            tensor.index_add_(dim, self.index(tensor.device), values.to(tensor.dtype))

    def index(self, device: torch.device) -> torch.Tensor:
        """Return the rows as int64 ``[num_rows]`` on a device. The first call copies them, without a sync."""
        index = self._on_device.get(device)
        if index is None:
            host = torch.empty(self.num_rows, dtype=torch.int64, pin_memory=device.type == "cuda")
            torch.cat([torch.arange(start, stop) for start, stop in self.intervals], out=host)
            index = host.to(device, non_blocking=True)
            self._on_device[device] = index
        return index


@dataclass(frozen=True, slots=True)
class PartRows:
    """The distribution of the rows of a tensor over its parts.

    Attributes:
        places: rows of each part; no row is in two parts.
    """

    places: tuple[Rows, ...]
    _segments: list[tuple[int, int, int, int]] = field(init=False, compare=False, repr=False)
    _pieces: dict[Rows, tuple[tuple[int, int, int], ...]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        segments = []
        for part, rows in enumerate(self.places):
            begins = accumulate((stop - start for start, stop in rows.intervals), initial=0)
            segments += [(*interval, part, begin) for interval, begin in zip(rows.intervals, begins, strict=False)]
        segments.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(segments)), f"{self.places=}"
        object.__setattr__(self, "_segments", segments)

    def pieces(self, rows: Rows) -> tuple[tuple[int, int, int], ...]:
        """Return the locations of rows, in order: (part, first row in the part, row after the last)."""
        if rows not in self._pieces:
            pieces: list[tuple[int, int, int]] = []
            for start, stop in rows.intervals:
                number = bisect_right(self._segments, start, key=lambda segment: segment[0]) - 1
                while start < stop:
                    first, last, part, begin = self._segments[number]
                    assert first <= start < last, f"no part holds row {start}: {self.places=}"
                    end = min(stop, last)
                    pieces.append((part, begin + start - first, begin + end - first))
                    start, number = end, number + 1
            self._pieces[rows] = tuple(pieces)
        return self._pieces[rows]


@dataclass(frozen=True, slots=True)
class RowParts:
    """A tensor ``[num_rows, ...]`` that is stored in parts, each a separate tensor. ``Rows`` reads and writes it.

    Attributes:
        rows: distribution of the rows over the parts.
        parts: at least one tensor ``[rows.places[i].num_rows, ...]``, all of the same dtype and device.
    """

    rows: PartRows
    parts: Sequence[torch.Tensor]

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the same dtype, device and row shape."""
        return self.parts[0]

    def take(self, rows: Rows) -> torch.Tensor:
        """Return rows ``[rows.num_rows, ...]``: a view if they are contiguous in one part, else a copy."""
        views = self._views(rows)
        if not views:
            return self.like[:0]
        return views[0] if len(views) == 1 else torch.cat(views)

    def matched(self, rows: Rows, values: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of the rows, each with the corresponding rows of ``values [rows.num_rows, ...]``."""
        views = self._views(rows)
        return zip(views, self._split(values, views), strict=True)

    def add_(self, rows: Rows, values: torch.Tensor) -> None:
        """Add ``values [rows.num_rows, ...]`` to the rows, in one launch on CUDA."""
        views = self._views(rows)
        if len(views) > 1:
            torch._foreach_add_(views, self._split(values.to(views[0].dtype), views))
        elif views:
            views[0].add_(values)

    def _views(self, rows: Rows) -> list[torch.Tensor]:
        views = []
        for part, start, stop in self.rows.pieces(rows):
            tensor = self.parts[part]
            views.append(tensor if stop - start == len(tensor) else tensor[start:stop])
        return views

    @staticmethod
    def _split(values: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the rows of ``values [n, ...]`` that correspond to each view, in order."""
        return list(values.split([len(view) for view in views])) if len(views) > 1 else [values] * len(views)


@dataclass(frozen=True, slots=True)
class CuSeqlens:
    """Offsets of documents laid end to end: document i has the rows ``[offsets[i], offsets[i + 1])``.

    Attributes:
        offsets: integers on the host that start at 0 and never descend; equal neighbours are an empty document.
        longest: number of tokens of the longest document; 0 without documents.

    Raises:
        ValueError: the offsets are empty, do not start at 0 or descend.
    """

    offsets: tuple[int, ...]
    longest: int = field(init=False, compare=False, repr=False)
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        lengths = self.lengths
        if not self.offsets or self.offsets[0] != 0 or min(lengths, default=0) < 0:
            raise ValueError(f"offsets must start at 0 and not descend, got {self.offsets}")
        # Stored, because every kernel call of every layer reads it.
        object.__setattr__(self, "longest", max(lengths, default=0))

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> CuSeqlens:
        """Return the offsets of documents with these lengths, laid end to end."""
        return cls(tuple(accumulate(lengths, initial=0)))

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return self.offsets[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in pairwise(self.offsets))

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the offsets as int32 ``[num_documents + 1]`` on a device. The first call copies, without a sync."""
        tensor = self._on_device.get(device)
        if tensor is None:
            host = torch.tensor(self.offsets, dtype=torch.int32, pin_memory=device.type == "cuda")
            tensor = host.to(device, non_blocking=True)
            self._on_device[device] = tensor
        return tensor
