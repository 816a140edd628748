"""Rows of a tensor, read, written and added to without a copy when they are one interval, and documents in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a tensor, in ascending order; made by ``Rows.of``.

    Rows of one interval are a view and cost nothing. Those of several are copied, by an index that is made once
    for each device.

    Attributes:
        intervals: ``(start, stop)``, ascending, none empty, no two adjacent.
    """

    intervals: tuple[tuple[int, int], ...]
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, intervals: Iterable[tuple[int, int]]) -> Rows:
        """The rows of ascending intervals; empty ones are left out and adjacent ones joined."""
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
        """Whether ``take`` gives a view."""
        return len(self.intervals) <= 1

    def take(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """These rows of a tensor, rows along ``dim``: a view when they are one interval, else a copy."""
        if self.is_view:
            start, stop = self.intervals[0] if self.intervals else (0, 0)
            return tensor.narrow(dim, start, stop - start)
        return tensor.index_select(dim, self._index(tensor.device))

    def put_(self, tensor: torch.Tensor, values: torch.Tensor, dim: int = 0) -> None:
        """Write these rows of a tensor."""
        if self.is_view:
            self.take(tensor, dim).copy_(values)
        else:
            tensor.index_copy_(dim, self._index(tensor.device), values.to(tensor.dtype))

    def add_(self, tensor: torch.Tensor, values: torch.Tensor, dim: int = 0) -> None:
        """Add to these rows of a tensor. No row is there twice, so the sum does not depend on an order."""
        if self.is_view:
            self.take(tensor, dim).add_(values)
        else:
            tensor.index_add_(dim, self._index(tensor.device), values.to(tensor.dtype))

    def _index(self, device: torch.device) -> torch.Tensor:
        """The rows as int64 on a device; copied on the first call, without a sync."""
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
        offsets: host integers, starting at 0, not descending.
        longest: tokens of the longest document (0 when there is none).
    """

    offsets: tuple[int, ...]
    longest: int = field(init=False, compare=False, repr=False)
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        lengths = self.lengths
        if not self.offsets or self.offsets[0] != 0 or min(lengths, default=0) < 0:
            raise ValueError(f"offsets must start at 0 and not descend, got {self.offsets}")
        # Every kernel call asks for it, in every layer.
        object.__setattr__(self, "longest", max(lengths, default=0))

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> CuSeqlens:
        """The offsets of documents of these lengths."""
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        return cls(tuple(offsets))

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
        """The offsets as int32 ``[num_documents + 1]`` on a device; copied on the first call, without a sync."""
        tensor = self._on_device.get(device)
        if tensor is None:
            host = torch.tensor(self.offsets, dtype=torch.int32, pin_memory=device.type == "cuda")
            tensor = host.to(device, non_blocking=True)
            self._on_device[device] = tensor
        return tensor
