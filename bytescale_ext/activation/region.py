"""Which memory a tensor covers, whatever its shape: so that views of the same memory are stored once.

A tensor's elements lie in memory in some order; a *region* names the elements without the shape. A tensor and its
reshaped or transposed views have one region. What is stored of a region is its elements in memory order, end to end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Region:
    """The elements of a tensor.

    Attributes:
        storage: address of the storage.
        start: first element, in elements of the storage.
        extents: (size, stride) from the outermost in memory to the innermost, merged where they follow on.
        dtype: of an element.
    """

    storage: int
    start: int
    extents: tuple[tuple[int, int], ...]
    dtype: torch.dtype


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dims of a tensor from the outermost in memory to the innermost; dims of size one keep to their neighbours."""
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-_stride(tensor, dim), dim)))


def _stride(tensor: torch.Tensor, dim: int) -> int:
    """The stride of a dim; for one of size 1, whose stride means nothing, that of the elements inside it."""
    if tensor.shape[dim] != 1:
        return tensor.stride(dim)
    inner = [tensor.stride(d) * tensor.shape[d] for d in range(dim + 1, tensor.dim()) if tensor.shape[d] != 1]
    return max(inner, default=1)


def region_of(tensor: torch.Tensor) -> Region | None:
    """The region of a tensor, or None where elements share memory (expanded tensors), or there are none."""
    if not tensor.numel():
        return None
    extents: list[tuple[int, int]] = []
    for dim in memory_order(tensor):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if size == 1:
            continue
        if stride == 0 or (extents and stride * size > extents[-1][1]):
            return None
        if extents and extents[-1][1] == size * stride:
            extents[-1] = (extents[-1][0] * size, stride)
        else:
            extents.append((size, stride))
    storage = tensor.untyped_storage().data_ptr()
    return Region(storage, int(tensor.storage_offset()), tuple(extents), tensor.dtype)


@dataclass(frozen=True)
class Shape:
    """How a tensor looks onto its region's elements.

    Attributes:
        sizes: of the tensor.
        order: its dims from the outermost in memory to the innermost.
        strides: of the tensor that was saved, in whose storage other elements may lie in between.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        """The shape of a tensor that has a region."""
        return cls(tuple(tensor.shape), memory_order(tensor), tensor.stride())

    def view(self, elements: torch.Tensor) -> torch.Tensor:
        """The tensor over ``elements`` [n], the region's elements end to end."""
        strides = [0] * len(self.sizes)
        step = 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= self.sizes[dim]
        assert step == elements.numel(), f"{self.sizes=} {elements.shape=}"
        return elements.as_strided(self.sizes, strides)

    def view_as_saved(self, elements: torch.Tensor) -> torch.Tensor:
        """As ``view``. On CPU with the strides of the saved tensor: torch's vector and scalar loops round differently,
        and which of them runs depends on gaps between the elements.
        """
        tensor = self.view(elements)
        if tensor.device.type != "cpu" or region_extents(self.sizes, self.order, self.strides) == 1:
            return tensor
        return torch.empty_strided(self.sizes, self.strides, dtype=tensor.dtype).copy_(tensor)


def region_extents(sizes: tuple[int, ...], order: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """In how many nested steps the elements of a tensor lie; 1 when they are end to end."""
    found: list[tuple[int, int]] = []
    for dim in order:
        if sizes[dim] == 1:
            continue
        if found and found[-1][1] == sizes[dim] * strides[dim]:
            found[-1] = (found[-1][0] * sizes[dim], strides[dim])
        else:
            found.append((sizes[dim], strides[dim]))
    return max(1, len(found))


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor with its dims in memory order."""
    return tensor.permute(memory_order(tensor))


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor end to end, [n]; a view where they already are."""
    return in_memory_order(tensor).reshape(-1)


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize
