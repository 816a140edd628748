"""Memory of ghost GPUs as CPU tensors."""

from __future__ import annotations

import ctypes

import torch


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor of the same shape over the memory of a tensor on a ghost GPU."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    room = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(room, dtype=torch.uint8)
    found = torch.empty(0, dtype=tensor.dtype)
    return found.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a CPU tensor of any shape on a ghost GPU."""
    if tensor.layout != torch.strided:
        raise RuntimeError(f"layout {tensor.layout} is not played")
    if tensor.numel() and any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        tensor = tensor.contiguous()
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        alias(result).copy_(tensor)
    return result
