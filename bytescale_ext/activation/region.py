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
        address: address of the first element.
        extents: (size, stride) of the dims from the outermost in memory to the innermost; contiguous dims are merged.
        dtype: element type.
    """

    address: int
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


@lru_cache(maxsize=4096)
def _dense_strides(sizes: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps whose dims are in this order in memory."""
    strides, step = [0] * len(sizes), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= sizes[dim]
    return tuple(strides)


def region_of(tensor: torch.Tensor) -> Region | None:
    """Return the region of a tensor of any shape; None if it is empty or its elements share memory (``expand``)."""
    return TensorView.of(tensor).region_of(tensor)


@dataclass(frozen=True)
class TensorView:
    """The shape of a tensor over the elements of its region.

    Attributes:
        sizes: shape of the tensor.
        order: dims of the tensor, the outermost in memory first.
        strides: strides of the saved tensor, which may have gaps between its elements.
        dense_strides: strides without gaps, in the same order.
        extents: extents of the region; None if the tensor is empty or its elements share memory.
        is_plain: whether the saved tensor is contiguous and not empty.
        has_gaps: whether the saved tensor has gaps between its elements.
        num_elements: number of elements.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    strides: tuple[int, ...]
    dense_strides: tuple[int, ...] = field(init=False, compare=False)
    extents: tuple[tuple[int, int], ...] | None = field(init=False, compare=False)
    is_plain: bool = field(init=False, compare=False)
    has_gaps: bool = field(init=False, compare=False)
    num_elements: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        step = math.prod(self.sizes)
        object.__setattr__(self, "dense_strides", _dense_strides(self.sizes, self.order))
        extents = _extents(self.sizes, self.strides) if step else None
        object.__setattr__(self, "extents", extents)
        is_plain = self.order == tuple(range(len(self.order))) and extents in ((), ((step, 1),))
        object.__setattr__(self, "is_plain", is_plain)
        object.__setattr__(self, "has_gaps", len(extents or ()) > 1)
        object.__setattr__(self, "num_elements", step)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorView:
        """Return the view of a tensor of any shape."""
        return _view_of(tensor.shape, tensor.stride())

    def region_of(self, tensor: torch.Tensor) -> Region | None:
        """Return the region of a tensor of any shape that has this view; see ``region_of``."""
        return None if self.extents is None else Region(tensor.data_ptr(), self.extents, tensor.dtype)

    @property
    def is_sample_major(self) -> bool:
        """Whether the rows of the tensor [rows, samples, ...] are stored sample by sample."""
        return len(self.sizes) > 2 and self.order[:2] == (1, 0)

    def apply(self, elements: torch.Tensor) -> torch.Tensor:
        """Return a tensor of shape ``sizes`` over contiguous ``elements`` of any shape, the region's elements."""
        assert self.num_elements == elements.numel(), f"{self.sizes=} {elements.shape=}"
        return elements.as_strided(self.sizes, self.dense_strides, elements.storage_offset())

    def apply_as_saved(self, elements: torch.Tensor) -> torch.Tensor:
        """Return a tensor of shape ``sizes`` over ``elements``, on CPU with the strides of the saved tensor.

        Gaps between elements decide whether torch runs a vectorized or a scalar loop, and the two round differently.
        """
        if self.is_plain and elements.shape == self.sizes:
            return elements
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
    return tensor if order == tuple(range(len(order))) else tensor.permute(order)


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor end to end, [n]; a view if they are contiguous."""
    return tensor.view(-1) if tensor.is_contiguous() else in_memory_order(tensor).reshape(-1)


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes of a tensor of any shape."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


@dataclass(slots=True)
class StoredRegion:
    """The elements of one region, on the device or in host memory, and the number of their uses to come.

    Attributes:
        kind: "input" if the region is never recomputed, "token" if it is recomputed between hook points or at a hook
            point, "product" if it is the output of a hook point and recomputation starts from it.
        view: shape of ``source``.
        source: tensor with the elements, until the end of the layer's forward pass.
        rows: (repeats, rows) of the outermost dim in memory, which has the tokens of each tensor-parallel rank in turn.
        uses: number of saved tensors that autograd has yet to ask for.
        kept: rows on the device, [repeats, k, ...], or all rows in any shape.
        written: the first ``written_rows`` rows in the arena, [repeats, w, ...], or all rows in ``shape``.
        elements: all elements, contiguous in any shape, from the restoration of the layer to their last use.
        shape: shape of new memory; the shape of a contiguous saved tensor, so that autograd takes the memory as it is.
        row_size: number of elements of a row.
        num_bytes: number of bytes of all elements.
    """

    kind: str
    view: TensorView
    source: torch.Tensor | None
    rows: tuple[int, int]
    uses: int = 0
    kept: torch.Tensor | None = None
    written: torch.Tensor | None = None
    written_rows: int = 0
    elements: torch.Tensor | None = None
    shape: tuple[int, ...] = field(init=False)
    row_size: int = field(init=False)
    num_bytes: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        assert self.source is not None, f"{self.kind=} {self.view=}"
        self.dtype, self.device = self.source.dtype, self.source.device
        self.shape = self.view.sizes if self.view.is_plain else (self.view.num_elements,)
        self.row_size = self.view.num_elements // (self.rows[0] * self.rows[1])
        self.num_bytes = self.view.num_elements * self.dtype.itemsize

    def some_rows(self, elements: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Return ``count`` rows from ``first`` on of contiguous ``elements``, in any shape: [repeats, count, row]."""
        (repeats, rows), size = self.rows, self.row_size
        start = elements.storage_offset() + first * size
        return elements.as_strided((repeats, count, size), (rows * size, size, 1), start)

    def allocate(self) -> torch.Tensor:
        """Return new device memory ``shape`` for all elements."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def put_rows(self, first: int, part: torch.Tensor) -> None:
        """Copy ``part``, whole rows in any shape in memory order, to the rows from ``first`` on."""
        if self.elements is None:
            self.elements = self.allocate()
        if self.rows[0] == 1:
            strides = _dense_strides(part.shape, tuple(range(part.dim())))
            start = self.elements.storage_offset() + first * self.row_size
            self.elements.as_strided(part.shape, strides, start).copy_(part)
            return
        part = part.reshape(self.rows[0], -1, self.row_size)
        self.some_rows(self.elements, first, part.shape[1]).copy_(part)

    def rejoin_kept(self) -> None:
        """Put the rows that stayed on the device after the rows that were read back."""
        kept, self.kept, self.written = self.kept, None, None
        if kept is None:
            return
        if kept.numel() == self.view.num_elements:
            self.elements = kept if kept.shape == self.shape else kept.reshape(self.shape)
        else:
            self.put_rows(self.written_rows, kept)
