"""Keys and values of slices in host memory, which are on the device only while attention uses them."""

from __future__ import annotations

import warnings
import weakref

import torch

from bytescale_ext.activation.link import HeldParts, Link, Ticket
from bytescale_ext.activation.region import num_bytes


class SwappedKeys:
    """Keys and values ``[2, rows, kv_heads, dim]`` of one slice in one layer, from its forward to its backward pass.

    They are written to host memory once, after their first use, and read back for each further use. If the host arena
    is full, they stay on the device.

    Args:
        keys: device memory for keys and values, which the attention of the slice fills.
        link: link to the host arena.
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
        """Start reading the keys back for the next use. Keys that are on the device stay there until then."""
        if self._keys is not None:
            self._used_next = True
            return
        assert self._in_host is not None
        self._keys = torch.empty_like(self._in_host, device=self._device)
        self._reading = self._held.last_copy = self._link.read([(self._keys, self._in_host)], self._written)

    def take(self) -> torch.Tensor:
        """Return keys and values ``[2, rows, kv_heads, dim]`` on the device."""
        if self._keys is None:
            self.read_ahead()
        assert self._keys is not None
        self._link.wait(self._reading)
        self._reading, self._used_next = None, False
        return self._keys

    def release(self) -> None:
        """Free the device memory after a use, unless ``read_ahead`` announced the next use.

        The first release also writes the keys to host memory.
        """
        if self._keys is None or self._used_next:
            return
        if self._in_host is not None or self._write(self._keys):
            self._keys = None

    def _write(self, keys: torch.Tensor) -> bool:
        """Start writing keys of any shape. Return False if the arena is full."""
        part = self._link.take(num_bytes(keys))
        if part is None:
            warnings.warn(
                f"the host arena of {self._link.arena.num_bytes / 1e9:.4g} GB is full, so keys of slices stay on the "
                "device; raise --host-memory-gb",
                stacklevel=2,
            )
            return False
        self._in_host = self._link.arena.view(part, tuple(keys.shape), keys.dtype)
        self._held.parts.append(part)
        self._written = self._held.last_copy = self._link.write([(self._in_host, keys)], [keys])
        return True
