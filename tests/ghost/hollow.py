"""Ghost GPUs without arithmetic, for the memory of large models: large operators only allocate their results.

Torch's caching allocator and all code around kernels are real. Pages that nothing writes take no memory of this
machine, so a process may have 80 GB on its ghost GPU. Small operators compute as usual, because the host reads their
results. Values of large tensors are zeros or arbitrary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.ghost.kernels import CpuKernel

VARIABLE = "GHOST_HOLLOW"
"""Environment variable that makes large kernels and NCCL messages (``lib/ghost_nccl.c``) hollow."""

LARGE = 1 << 16
"""Elements of the arguments of a large operator."""

COMPUTED = frozenset("_local_scalar_dense nonzero masked_select equal is_nonzero _unique2".split())

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides and type of a tensor."""


def is_hollow() -> bool:
    """Return whether this process has hollow ghost GPUs."""
    return os.environ.get(VARIABLE) == "1"


@dataclass
class HollowKernel:
    """CUDA kernel of an operator that computes small arguments, and allocates the results of large ones.

    Attributes:
        cpu: the operator, and the arguments that it writes.
        kernel: kernel that computes.
    """

    cpu: CpuKernel
    kernel: Callable[..., Any]
    _found: dict[object, list[Layout | object]] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of((args, kwargs))
        is_small = not are_large(tensors)
        is_small_copy = self.cpu.name == "copy_" and tensors[0].numel() <= LARGE
        if is_small or is_small_copy or self.cpu.name in COMPUTED:
            return self.kernel(*args, **kwargs)
        if any(self.cpu.written) and None not in self.cpu.returned:
            found = tuple(self.cpu.argument(place, args, kwargs) for place in self.cpu.returned if place is not None)
            return found[0] if len(found) == 1 else found or None
        return self._allocate(next(one.device for one in tensors if one.is_cuda), args, kwargs)

    def _allocate(self, device: torch.device, args: Any, kwargs: Any) -> Any:
        key = _signature((args, kwargs))
        if key not in self._found:
            found = self.cpu.operator(*_on_meta(args), **_on_meta(kwargs))
            values = found if isinstance(found, tuple | list) else (found,)
            layouts = [
                (tuple(one.shape), one.stride(), one.dtype) if isinstance(one, torch.Tensor) else one for one in values
            ]
            self._found[key] = [isinstance(found, tuple | list), *layouts]
        is_many, *layouts = self._found[key]
        made = [
            torch.empty_strided(one[0], one[1], dtype=one[2], device=device) if isinstance(one, tuple) else one
            for one in layouts
        ]
        return tuple(made) if is_many else made[0]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values inside tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside arguments."""
    return [one for one in _leaves(value) if isinstance(one, torch.Tensor)]


def are_large(tensors: list[torch.Tensor]) -> bool:
    """Return whether an operator of these tensors is large."""
    return sum(one.numel() for one in tensors) > LARGE


def _signature(value: Any) -> object:
    """Return a key that is equal for arguments with results of equal layouts."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(_signature(one) for one in value)
    if isinstance(value, dict):
        return tuple((name, _signature(one)) for name, one in value.items())
    return str(value)


def _on_meta(value: Any) -> Any:
    """Return arguments of an operator that computes nothing."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, tuple | list):
        return type(value)(_on_meta(one) for one in value)
    if isinstance(value, dict):
        return {name: _on_meta(one) for name, one in value.items()}
    return value


def room_for(function: Callable[..., Any], device: torch.device, args: Any, kwargs: Any) -> Any:
    """Return room for the results of a function of tensors that calls torch's operators; it may return arguments."""
    metas = {id(one): _on_meta(one) for one in tensors_of((args, kwargs))}
    given = {id(metas[id(one)]): one for one in tensors_of((args, kwargs))}
    found = function(*_replaced(args, metas), **_replaced(kwargs, metas))
    rooms = {
        id(one): torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device)
        for one in tensors_of(found)
        if id(one) not in given
    }
    return _replaced(found, given | rooms)


def _replaced(value: Any, by: dict[int, torch.Tensor]) -> Any:
    """Return a value with other tensors. ``by``: tensor, by the identity of the tensor that it replaces."""
    if isinstance(value, tuple | list):
        return type(value)(_replaced(one, by) for one in value)
    if isinstance(value, dict):
        return {name: _replaced(one, by) for name, one in value.items()}
    return by[id(value)] if isinstance(value, torch.Tensor) else value


# ---- operators without a version that computes nothing


def rms_norm_backward(
    grad_out: torch.Tensor, input: torch.Tensor, shape: Any, rstd: Any, weight: torch.Tensor | None, mask: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return room for the gradients of input [..., n] and weight [n] of ``torch.rms_norm``."""
    has_weight = mask[1] and weight is not None
    return torch.empty_like(input) if mask[0] else None, torch.empty_like(weight) if has_weight else None


def product(self: Any, mat1: torch.Tensor, mat2: torch.Tensor, out_dtype: torch.dtype, **_: Any) -> torch.Tensor:
    """Return room for the product of [m, k] and [k, n] in a type."""
    return mat1.new_empty((mat1.shape[0], mat2.shape[1]), dtype=out_dtype)


def products(self: torch.Tensor, mat2: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Return room for the products of [n, m, k] and [n, k, columns] in a type."""
    return self.new_empty((*self.shape[:2], mat2.shape[2]), dtype=out_dtype)


def product_out(self: Any, mat1: Any, mat2: Any, out_dtype: Any, *, out: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return ``out``."""
    return out


def flash_forward(query: torch.Tensor, key: Any, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """Return room for the results of ``flash.forward``."""
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    seeds = torch.zeros(2, dtype=torch.int64, device=query.device).view(torch.uint64)
    return out, sums, seeds, seeds[:0], query.new_empty(0)


def flash_backward(grad: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Return room for the gradients of query, key and value."""
    return tuple(torch.empty_like(one) for one in (query, key, value))


SPECIAL: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_fused_rms_norm_backward": rms_norm_backward,
    "addmm.dtype": product,
    "addmm.dtype_out": product_out,
    "bmm.dtype": products,
}
"""Kernels that never compute."""
