"""Two values: some rows of a tensor, and the offsets of packed documents.

``Rows`` reads, writes and adds to rows without a copy when they are one interval. Both copy their data to a device once
and without a sync.
"""

from __future__ import annotations

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

    def take(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return these rows of a tensor: a view when they are one interval, else a copy.

        Args:
            tensor: any shape and dtype, rows along ``dim``.
            dim: the dimension.

        Returns:
            The same shape with ``num_rows`` rows along ``dim``.
        """
        if self.is_view:
            start, stop = self.intervals[0] if self.intervals else (0, 0)
            return tensor.narrow(dim, start, stop - start)
        return tensor.index_select(dim, self._index(tensor.device))

    def put_(self, tensor: torch.Tensor, values: torch.Tensor, dim: int = 0) -> None:
        """Write ``values`` (the shape that ``take`` returns, any dtype) to these rows of a tensor."""
        if self.is_view:
            self.take(tensor, dim).copy_(values)
        else:
            tensor.index_copy_(dim, self._index(tensor.device), values.to(tensor.dtype))

    def add_(self, tensor: torch.Tensor, values: torch.Tensor, dim: int = 0) -> None:
        """Add ``values`` (the shape that ``take`` returns, any dtype) to these rows of a tensor.

        No row occurs twice, so the result does not depend on the order of additions.
        """
        if self.is_view:
            self.take(tensor, dim).add_(values)
        else:
            tensor.index_add_(dim, self._index(tensor.device), values.to(tensor.dtype))

    def _index(self, device: torch.device) -> torch.Tensor:
        """Return the rows as int64 ``[num_rows]`` on a device; the first call copies them, without a sync."""
        index = self._on_device.get(device)
        if index is None:
            host = torch.empty(self.num_rows, dtype=torch.int64, pin_memory=device.type == "cuda")
            torch.cat([torch.arange(start, stop) for start, stop in self.intervals], out=host)
            index = host.to(device, non_blocking=True)
            self._on_device[device] = index
        return index


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
