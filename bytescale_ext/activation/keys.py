"""Keys of slices in host memory: on the device only while attention uses them, by the link of swapped activations."""

from __future__ import annotations

import warnings
import weakref

import torch

from bytescale_ext.activation.link import HeldParts, Link, Ticket
from bytescale_ext.activation.region import num_bytes


class SwappedKeys:
    """Keys and values of one slice in one layer, ``[2, rows, kv_heads, dim]``, from its forward to its backward pass.

    They are written to host memory once, after their first use, and read back for each further one. Where the host
    arena has no room they stay on the device.

    Args:
        keys: on the device; attention of the slice fills them.
        link: to the host arena.
    """

    def __init__(self, keys: torch.Tensor, link: Link) -> None:
        self._keys: torch.Tensor | None = keys
        self._device = keys.device
        self._link = link
        self._in_host: torch.Tensor | None = None
        self._written: Ticket = None
        self._reading: Ticket = None
        self._used_next = False
        self._held = HeldParts()
        weakref.finalize(self, self._held.give_back, link)

    def read_ahead(self) -> None:
        """Start reading the keys back for the next use; where they are on the device, they stay until then."""
        if self._keys is not None:
            self._used_next = True
            return
        assert self._in_host is not None
        self._keys = torch.empty_like(self._in_host, device=self._device)
        self._reading = self._held.last_copy = self._link.read([(self._keys, self._in_host)], self._written)

    def take(self) -> torch.Tensor:
        """Return the keys, ``[2, rows, kv_heads, dim]`` on the device."""
        if self._keys is None:
            self.read_ahead()
        assert self._keys is not None
        self._link.wait(self._reading)
        self._reading, self._used_next = None, False
        return self._keys

    def leave(self) -> None:
        """Free device memory after a use, unless the next use was announced; the first time, write the keys first."""
        if self._keys is None or self._used_next:
            return
        if self._in_host is not None or self._write(self._keys):
            self._keys = None

    def _write(self, keys: torch.Tensor) -> bool:
        """Start writing the keys; return whether there was room. ``keys``: of any shape."""
        block = self._link.take(num_bytes(keys))
        if block is None:
            warnings.warn(
                f"the host arena of {self._link.arena.num_bytes / 1e9:.4g} GB is full: keys of slices stay on the "
                "device; raise --host-memory-gb",
                stacklevel=2,
            )
            return False
        self._in_host = self._link.arena.view(block, tuple(keys.shape), keys.dtype)
        self._held.blocks.append(block)
        self._written = self._held.last_copy = self._link.write([(self._in_host, keys)], [keys])
        return True
