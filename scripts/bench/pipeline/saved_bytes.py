"""Count the bytes that autograd keeps for the backward pass, on any device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


class SavedBytes:
    """Context that counts the bytes of tensors saved for backward: each storage once, without parameters.

    Attributes:
        held_bytes: bytes saved now.
        peak_bytes: largest ``held_bytes`` so far.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self.peak_bytes = 0
        self._users: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> _Saved | torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, torch.nn.Parameter) or not tensor.is_floating_point():
            return tensor
        return _Saved(self, tensor)

    def take(self, storage: int, num_bytes: int) -> None:
        """Add a user of a storage."""
        if not self._users[storage]:
            self.held_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._users[storage] += 1

    def drop(self, storage: int, num_bytes: int) -> None:
        """Remove a user of a storage."""
        self._users[storage] -= 1
        if not self._users[storage]:
            self.held_bytes -= num_bytes


class _Saved:
    """A saved tensor that counts until autograd frees it."""

    def __init__(self, counter: SavedBytes, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self.counter, self.size = tensor, counter, (storage.data_ptr(), storage.nbytes())
        counter.take(*self.size)

    def __del__(self) -> None:
        self.counter.drop(*self.size)


def _unpack(saved: _Saved | torch.Tensor) -> torch.Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved
