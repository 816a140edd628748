"""The memory that a tensor covers, without its shape, so that views of the same memory are stored once.

A *region* names the elements of a tensor. A tensor and its reshaped or transposed views have the same region. Its
elements are stored end to end, in memory order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Region:
    """The elements of a tensor, as a key.

    Attributes:
        storage: address of the storage.
        start: first element, in elements of the storage.
        extents: (size, stride) from the outermost in memory to the innermost, merged where they are contiguous.
        dtype: of an element.
    """

    storage: int
    start: int
    extents: tuple[tuple[int, int], ...]
    dtype: torch.dtype


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dims of a tensor of any shape from the outermost in memory inwards; dims of size 1 stay in place."""
    return _memory_order(tensor.shape, tensor.stride())


def is_sample_major(tensor: torch.Tensor) -> bool:
    """Return whether the rows of a tensor [rows, samples, ...] lie in memory sample by sample, equally far apart."""
    if tensor.dim() < 3 or memory_order(tensor)[:2] != (1, 0):
        return False
    return tensor.stride(1) == tensor.shape[0] * tensor.stride(0)


# Layers save tensors of the same shapes again and again: what follows from a shape is found once.
@lru_cache(maxsize=4096)
def _memory_order(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    def stride_of(dim: int) -> int:
        """Return the stride of a dim. That of size 1 means nothing: return the extent of the dims inside."""
        if sizes[dim] != 1:
            return strides[dim]
        inside = range(dim + 1, len(sizes))
        return max((strides[inner] * sizes[inner] for inner in inside if sizes[inner] != 1), default=1)

    return tuple(sorted(range(len(sizes)), key=lambda dim: (-stride_of(dim), dim)))


@lru_cache(maxsize=4096)
def _extents(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """Return (size, stride) of nested runs of elements, as in ``Region``; None if elements share memory."""
    found: list[tuple[int, int]] = []
    for dim in _memory_order(sizes, strides):
        size, stride = sizes[dim], strides[dim]
        if size == 1:
            continue
        if stride == 0 or (found and stride * size > found[-1][1]):
            return None
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return tuple(found)


def region_of(tensor: torch.Tensor) -> Region | None:
    """Return the region of a tensor of any shape; None if it is empty, or elements share memory (expanded ones)."""
    extents = _extents(tensor.shape, tensor.stride())
    if extents is None or not tensor.numel():
        return None
    return Region(tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), extents, tensor.dtype)


@dataclass(frozen=True)
class TensorView:
    """The shape of a tensor over the elements of its region.

    Attributes:
        sizes: of the tensor.
        order: its dims from the outermost in memory to the innermost.
        strides: of the saved tensor, whose elements may have gaps between them.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorView:
        """Return the view of a tensor of any shape that has a region."""
        return cls(tuple(tensor.shape), memory_order(tensor), tensor.stride())

    @property
    def is_sample_major(self) -> bool:
        """Whether the rows of the tensor [rows, samples, ...] are stored sample by sample."""
        return len(self.sizes) > 2 and self.order[:2] == (1, 0)

    def apply(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the tensor over ``elements`` [n], the region's elements end to end."""
        strides = [0] * len(self.sizes)
        step = 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= self.sizes[dim]
        assert step == elements.numel(), f"{self.sizes=} {elements.shape=}"
        return elements.as_strided(self.sizes, strides)

    def apply_as_saved(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the tensor over ``elements`` [n]; on CPU with the strides of the saved tensor.

        Gaps between elements decide whether torch runs its vector or its scalar loop, and the two round differently.
        """
        tensor = self.apply(elements)
        extents = _extents(self.sizes, self.strides)
        assert extents is not None, f"{self.sizes=} {self.strides=}"
        if tensor.device.type != "cpu" or len(extents) < 2:
            return tensor
        return torch.empty_strided(self.sizes, self.strides, dtype=tensor.dtype).copy_(tensor)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor of any shape with its dims in memory order."""
    return tensor.permute(memory_order(tensor))


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor end to end, [n]; a view if they are contiguous already."""
    return in_memory_order(tensor).reshape(-1)


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of a tensor of any shape."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


@dataclass
class StoredRegion:
    """The elements of one region: where they are now, and how many tensors autograd will still ask for.

    Attributes:
        kind: "input" (never recomputed), "token" (rebuilt between hook points, or at one) or "product" (output of a
            hook point that is an input of the rebuilding).
        view: the shape of ``source``.
        source: the tensor, until the layer has run forward.
        rows: (repeats, rows) of the outermost dim in memory: the tokens of each tensor-parallel rank in turn.
        uses: saved tensors that autograd has not asked for yet.
        kept: rows on the device, [repeats, k, ...].
        written: rows in the arena, [repeats, w, ...].
        elements: all elements, [n], from their restoration to their last use.
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
        """Bytes of all elements."""
        return self.num_elements * self.dtype.itemsize

    def by_rows(self, elements: torch.Tensor) -> torch.Tensor:
        """Return elements [n] of whole rows as [repeats, rows, row]."""
        return elements.view(self.rows[0], -1, self.num_elements // (self.rows[0] * self.rows[1]))

    def allocate(self) -> torch.Tensor:
        """Return new device memory for all elements, [n]."""
        return torch.empty(self.num_elements, dtype=self.dtype, device=self.device)

    def put_rows(self, first: int, part: torch.Tensor) -> None:
        """Copy ``part``, any shape of whole rows, to the rows from ``first`` on."""
        if self.elements is None:
            self.elements = self.allocate()
        rows = self.by_rows(self.elements)
        part = part.reshape(rows.shape[0], -1, rows.shape[2])
        rows[:, first : first + part.shape[1]] = part

    def rejoin_kept(self) -> None:
        """Put the rows that stayed on the device beside the rows that were read back."""
        kept, self.kept, written, self.written = self.kept, None, self.written, None
        if kept is None:
            return
        if kept.shape[1] == self.rows[1]:
            self.elements = kept.reshape(-1)
        else:
            self.put_rows(written.shape[1] if written is not None else 0, kept)
