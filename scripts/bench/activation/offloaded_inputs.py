"""Full recompute with the layer inputs in host memory, as ALST and Unsloth do it, on our arena and streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bytescale_ext.activation.link import Link


@dataclass(eq=False)
class SavedInput:
    """A layer's input in host memory.

    Attributes:
        previous: input of the layer before, which is read back while this layer runs backward.
        near: device memory into which the input is read; None before that.
    """

    link: Link
    block: Any
    host: torch.Tensor
    device: torch.device
    written: Any
    previous: SavedInput | None
    near: torch.Tensor | None = None
    reading: Any = None

    def read(self) -> torch.Tensor:
        """Start to read the input back, in its shape; a second call only returns it."""
        if self.near is None:
            self.near = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
            self.reading = self.link.read([(self.near, self.host)], self.written)
            self.link.give_back(self.block, self.reading)
        return self.near


class OffloadedInputs:
    """Moves the inputs of layers under full recompute to the host.

    Args:
        link: link to the host.
        num_moved: number of first layers whose inputs move.
    """

    def __init__(self, link: Link, num_moved: int) -> None:
        self.link = link
        self.num_moved = num_moved
        self._inputs: list[SavedInput] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedInput:
        """Return the object that autograd keeps: a layer input [s, b, h] in host memory, or the tensor."""
        if tensor.dim() != 3 or not tensor.is_floating_point() or len(self._inputs) >= self.num_moved:
            return tensor
        block = self.link.take(tensor.numel() * tensor.element_size())
        if block is None:
            return tensor
        host = self.link.arena.view(block, tuple(tensor.shape), tensor.dtype)
        source = tensor.detach()
        written = self.link.write([(host, source)], [source])
        previous = self._inputs[-1] if self._inputs else None
        self._inputs.append(SavedInput(self.link, block, host, tensor.device, written, previous))
        return self._inputs[-1]

    def unpack(self, saved: torch.Tensor | SavedInput) -> torch.Tensor:
        """Return the tensor in its shape, and start to read the input before it back."""
        if isinstance(saved, torch.Tensor):
            return saved
        self.link.settle()
        near = saved.read()
        if saved.previous is not None:
            saved.previous.read()
            saved.previous = None
        self.link.wait(saved.reading)
        return near

    @contextlib.contextmanager
    def during(self, decoder: torch.nn.Module) -> Iterator[None]:
        """Catch the tensors that the decoder saves in its forward pass, but not when its layers run again."""
        hooks: list[Any] = []

        def begin(*_: Any) -> None:
            self._inputs.clear()
            hooks.append(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
            hooks[-1].__enter__()

        def end(*_: Any) -> None:
            hooks.pop().__exit__()

        handles = [decoder.register_forward_pre_hook(begin), decoder.register_forward_hook(end)]
        try:
            yield
        finally:
            while hooks:  # the decoder raised: later tensors are not its own
                end()
            for handle in handles:
                handle.remove()
            self._inputs.clear()
