"""Regions: the memory that a tensor covers, regardless of its shape, so that views of the same memory are stored once.

A tensor and its reshaped or transposed views have the same region. The elements of a region are stored end to end, in
memory order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch


class Region(NamedTuple):
    """The elements of a tensor, as a hashable key.

    Attributes:
        storage: address of the storage.
        start: offset of the first element in the storage, in elements.
        extents: (size, stride) of the dims from the outermost in memory to the innermost; contiguous dims are merged.
        dtype: element type.
    """

    storage: int
    start: int
    extents: tuple[tuple[int, int], ...]
    dtype: torch.dtype


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dims of a tensor of any shape, the outermost in memory first. Dims of size 1 keep their place."""
    return _memory_order(tensor.shape, tensor.stride())


def is_sample_major(tensor: torch.Tensor) -> bool:
    """Return whether a tensor [rows, samples, ...] is stored sample by sample, with equal distances between rows."""
    return _is_sample_major(tensor.shape, tensor.stride())


# Layers save tensors of the same shapes again and again, so the orders of their dims are cached.
@lru_cache(maxsize=4096)
def _memory_order(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    def stride_of(dim: int) -> int:
        """Return the stride of a dim. The stride of size 1 means nothing, so return the extent of the inner dims."""
        if sizes[dim] != 1:
            return strides[dim]
        inside = range(dim + 1, len(sizes))
        return max((strides[inner] * sizes[inner] for inner in inside if sizes[inner] != 1), default=1)

    return tuple(sorted(range(len(sizes)), key=lambda dim: (-stride_of(dim), dim)))


@lru_cache(maxsize=4096)
def _is_sample_major(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if len(sizes) < 3 or _memory_order(sizes, strides)[:2] != (1, 0):
        return False
    return strides[1] == sizes[0] * strides[0]


@lru_cache(maxsize=4096)
def _extents(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """Return the extents of a ``Region``, or None if elements share memory."""
    extents: list[tuple[int, int]] = []
    for dim in _memory_order(sizes, strides):
        size, stride = sizes[dim], strides[dim]
        if size == 1:
            continue
        if stride == 0 or (extents and stride * size > extents[-1][1]):
            return None
        if extents and extents[-1][1] == size * stride:
            extents[-1] = (extents[-1][0] * size, stride)
        else:
            extents.append((size, stride))
    return tuple(extents)


def region_of(tensor: torch.Tensor) -> Region | None:
    """Return the region of a tensor of any shape; None if it is empty or its elements share memory (``expand``)."""
    extents = _extents(tensor.shape, tensor.stride())
    if extents is None or not tensor.numel():
        return None
    return Region(tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), extents, tensor.dtype)


@dataclass(frozen=True)
class TensorView:
    """The shape of a tensor over the elements of its region.

    Attributes:
        sizes: shape of the tensor.
        order: dims of the tensor, the outermost in memory first.
        strides: strides of the saved tensor, which may have gaps between its elements.
        dense_strides: strides without gaps, in the same order.
        has_gaps: whether the saved tensor has gaps between its elements.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    strides: tuple[int, ...]
    dense_strides: tuple[int, ...] = field(init=False, compare=False)
    has_gaps: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        strides, step = [0] * len(self.sizes), 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= self.sizes[dim]
        object.__setattr__(self, "dense_strides", tuple(strides))
        object.__setattr__(self, "has_gaps", len(_extents(self.sizes, self.strides) or ()) > 1)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorView:
        """Return the view of a tensor of any shape that has a region."""
        return _view_of(tensor.shape, tensor.stride())

    @property
    def is_sample_major(self) -> bool:
        """Whether the rows of the tensor [rows, samples, ...] are stored sample by sample."""
        return len(self.sizes) > 2 and self.order[:2] == (1, 0)

    def apply(self, elements: torch.Tensor) -> torch.Tensor:
        """Return a tensor of shape ``sizes`` over ``elements`` [n], the region's elements end to end."""
        assert math.prod(self.sizes) == elements.numel(), f"{self.sizes=} {elements.shape=}"
        return elements.as_strided(self.sizes, self.dense_strides, elements.storage_offset())

    def apply_as_saved(self, elements: torch.Tensor) -> torch.Tensor:
        """Return a tensor of shape ``sizes`` over ``elements`` [n], on CPU with the strides of the saved tensor.

        Gaps between elements decide whether torch runs a vectorized or a scalar loop, and the two round differently.
        """
        tensor = self.apply(elements)
        if not self.has_gaps or tensor.device.type != "cpu":
            return tensor
        return torch.empty_strided(self.sizes, self.strides, dtype=tensor.dtype).copy_(tensor)


@lru_cache(maxsize=4096)
def _view_of(sizes: tuple[int, ...], strides: tuple[int, ...]) -> TensorView:
    return TensorView(tuple(sizes), _memory_order(sizes, strides), tuple(strides))


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of any shape, or a view of it, with its dims in memory order."""
    order = memory_order(tensor)
    return tensor if all(dim == place for place, dim in enumerate(order)) else tensor.permute(order)


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor end to end, [n]; a view if they are contiguous."""
    return tensor.view(-1) if tensor.is_contiguous() else in_memory_order(tensor).reshape(-1)


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes of a tensor of any shape."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


@dataclass
class StoredRegion:
    """The elements of one region, on the device or in host memory, and the number of their uses to come.

    Attributes:
        kind: "input" if the region is never recomputed, "token" if it is recomputed between hook points or at a hook
            point, "product" if it is the output of a hook point and recomputation starts from it.
        view: shape of ``source``.
        source: tensor with the elements, until the end of the layer's forward pass.
        rows: (repeats, rows) of the outermost dim in memory, which has the tokens of each tensor-parallel rank in turn.
        uses: number of saved tensors that autograd has yet to ask for.
        kept: rows on the device, [repeats, k, ...].
        written: rows in the arena, [repeats, w, ...].
        elements: all elements [n], from the restoration of the layer to their last use.
    """

    kind: str
    view: TensorView
    source: torch.Tensor | None
    rows: tuple[int, int]
    uses: int = 0
    kept: torch.Tensor | None = None
    written: torch.Tensor | None = None
    elements: torch.Tensor | None = None
    num_elements: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        assert self.source is not None, f"{self.kind=} {self.view=}"
        self.num_elements, self.dtype, self.device = self.source.numel(), self.source.dtype, self.source.device

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all elements."""
        return self.num_elements * self.dtype.itemsize

    def by_rows(self, elements: torch.Tensor) -> torch.Tensor:
        """Return elements [n] of whole rows as [repeats, rows, row]."""
        return elements.view(self.rows[0], -1, self.num_elements // (self.rows[0] * self.rows[1]))

    def allocate(self) -> torch.Tensor:
        """Return new device memory for all elements, [n]."""
        return torch.empty(self.num_elements, dtype=self.dtype, device=self.device)

    def put_rows(self, first: int, part: torch.Tensor) -> None:
        """Copy ``part``, whole rows in any shape, to the rows from ``first`` on."""
        if self.elements is None:
            self.elements = self.allocate()
        rows = self.by_rows(self.elements)
        part = part.reshape(rows.shape[0], -1, rows.shape[2])
        rows.narrow(1, first, part.shape[1]).copy_(part)

    def rejoin_kept(self) -> None:
        """Put the rows that stayed on the device after the rows that were read back."""
        kept, self.kept, written, self.written = self.kept, None, self.written, None
        if kept is None:
            return
        if kept.shape[1] == self.rows[1]:
            self.elements = kept.reshape(-1)
        else:
            self.put_rows(written.shape[1] if written is not None else 0, kept)
