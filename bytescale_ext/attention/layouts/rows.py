"""Three values: some rows of a tensor, a tensor that is held in parts, and the offsets of packed documents.

``Rows`` reads, writes and adds to rows without a copy when they are one interval. ``Rows`` and ``CuSeqlens`` copy their
data to a device once and without a sync.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a tensor, in ascending order; made by ``Rows.of``.

    One interval is read as a view, which costs nothing. Several intervals are gathered by an index, which is made
    once for each device.

    Attributes:
        intervals: ``(start, stop)``, ascending, none empty, no two adjacent.
    """

    intervals: tuple[tuple[int, int], ...]
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, intervals: Iterable[tuple[int, int]]) -> Rows:
        """Return the rows of ascending intervals; drop empty intervals and join adjacent ones."""
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
        """Return these rows of a tensor: a view when they are one interval (of one part), else a copy.

        Args:
            tensor: any shape and dtype, rows along ``dim``.
            dim: the dimension; 0 for a tensor in parts.

        Returns:
            The same shape with ``num_rows`` rows along ``dim``.
        """
        if isinstance(tensor, RowParts):
            return tensor.take(self)
        if self.is_view:
            start, stop = self.intervals[0] if self.intervals else (0, 0)
            return tensor.narrow(dim, start, stop - start)
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

        No row occurs twice, so the result does not depend on the order of additions.
        """
        if isinstance(tensor, RowParts):
            for view, part in tensor.matched(self, values):
                view.add_(part)
        elif self.is_view:
            self.take(tensor, dim).add_(values)
        else:
            tensor.index_add_(dim, self.index(tensor.device), values.to(tensor.dtype))

    def index(self, device: torch.device) -> torch.Tensor:
        """Return the rows as int64 ``[num_rows]`` on a device; the first call copies them, without a sync."""
        index = self._on_device.get(device)
        if index is None:
            host = torch.empty(self.num_rows, dtype=torch.int64, pin_memory=device.type == "cuda")
            torch.cat([torch.arange(start, stop) for start, stop in self.intervals], out=host)
            index = host.to(device, non_blocking=True)
            self._on_device[device] = index
        return index


@dataclass(frozen=True, slots=True)
class PartRows:
    """Which rows of a tensor each of its parts holds.

    Attributes:
        places: the rows of each part; no row is in two parts.
    """

    places: tuple[Rows, ...]
    _segments: list[tuple[int, int, int, int]] = field(init=False, compare=False, repr=False)
    _pieces: dict[Rows, tuple[tuple[int, int, int], ...]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        found = []
        for part, rows in enumerate(self.places):
            begins = accumulate((stop - start for start, stop in rows.intervals), initial=0)
            found += [(*interval, part, begin) for interval, begin in zip(rows.intervals, begins, strict=False)]
        found.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(found)), f"{self.places=}"
        object.__setattr__(self, "_segments", found)

    def pieces(self, rows: Rows) -> tuple[tuple[int, int, int], ...]:
        """Return where these rows lie, in their order: (part, first row in the part, row after the last)."""
        if rows not in self._pieces:
            found: list[tuple[int, int, int]] = []
            for start, stop in rows.intervals:
                number = bisect_right(self._segments, start, key=lambda segment: segment[0]) - 1
                while start < stop:
                    first, last, part, begin = self._segments[number]
                    assert first <= start < last, f"no part holds row {start}: {self.places=}"
                    end = min(stop, last)
                    found.append((part, begin + start - first, begin + end - first))
                    start, number = end, number + 1
            self._pieces[rows] = tuple(found)
        return self._pieces[rows]


@dataclass(frozen=True, slots=True)
class RowParts:
    """A tensor ``[num_rows, ...]`` that is held in parts, each a tensor of its own; ``Rows`` reads and writes it.

    Attributes:
        rows: which rows each part holds.
        parts: ``[rows.places[i].num_rows, ...]`` each, at least one, of one dtype and device.
    """

    rows: PartRows
    parts: Sequence[torch.Tensor]

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the same dtype, device and row shape."""
        return self.parts[0]

    def take(self, rows: Rows) -> torch.Tensor:
        """Return rows ``[rows.num_rows, ...]``: a view when one part holds them in one piece, else a copy."""
        views = self._views(rows)
        if not views:
            return self.like[:0]
        return views[0] if len(views) == 1 else torch.cat(views)

    def matched(self, rows: Rows, values: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of these rows, each with its rows of ``values [rows.num_rows, ...]``."""
        views = self._views(rows)
        return zip(views, values.split([len(view) for view in views]), strict=True) if views else ()

    def _views(self, rows: Rows) -> list[torch.Tensor]:
        return [self.parts[part][start:stop] for part, start, stop in self.rows.pieces(rows)]


@dataclass(frozen=True, slots=True)
class CuSeqlens:
    """Offsets of documents laid end to end: document i is the rows ``[offsets[i], offsets[i + 1])``.

    Attributes:
        offsets: host integers, starting at 0, never descending; equal neighbours are an empty document.
        longest: tokens of the longest document (0 without documents).

    Raises:
        ValueError: the offsets are empty, start elsewhere or descend.
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
        """Return the offsets of documents of these lengths, laid end to end."""
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
        """Return the offsets as int32 ``[num_documents + 1]`` on a device; the first call copies, without a sync."""
        tensor = self._on_device.get(device)
        if tensor is None:
            host = torch.tensor(self.offsets, dtype=torch.int32, pin_memory=device.type == "cuda")
            tensor = host.to(device, non_blocking=True)
            self._on_device[device] = tensor
        return tensor
