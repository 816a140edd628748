"""A window of layers on the device: parameters are in host memory, and come ahead of the passes that need them.

    layer      0 1 2 3 4 5 6 7
    forward    . . x x . . . .      layer 2 computes, layer 3 is on its way
    backward   . . . . x x . .      layer 5 computes, layer 4 is on its way

Passes do not change parameters, so a layer that leaves the window is just dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from bytescale_ext.activation.arena import HostArena
from bytescale_ext.activation.link import Link, Ticket, make_link


class Away:
    """Parameters in host memory that come to the device together.

    Attributes:
        is_here: whether they have come or are on their way.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        """``parameters``: of any shapes, in host memory."""
        self._host = {parameter: parameter.data for parameter in parameters}
        self._device = device
        self._coming: tuple[list[torch.Tensor], Ticket] | None = None
        self.is_here = False

    @property
    def num_bytes(self) -> int:
        """Device memory of the parameters."""
        return sum(host.nbytes for host in self._host.values())

    def fetch(self, link: Link) -> None:
        """Start to copy the parameters to the device."""
        if not self.is_here:
            tensors = [torch.empty_like(host, device=self._device) for host in self._host.values()]
            self._coming = tensors, link.read(list(zip(tensors, self._host.values(), strict=True)), None)
            self.is_here = True

    def hold(self, link: Link) -> None:
        """Have the parameters on the device."""
        self.fetch(link)
        if self._coming is not None:
            tensors, ticket = self._coming
            link.wait(ticket)
            for parameter, tensor in zip(self._host, tensors, strict=True):
                parameter.data = tensor
            self._coming = None

    def release(self, link: Link) -> None:
        """Drop what is on the device."""
        if self._coming is not None:
            link.wait(self._coming[1])  # its memory is free for computing, which must not come before the copy
            self._coming = None
        for parameter, host in self._host.items():
            parameter.data = host
        self.is_here = False


class LayerWindow:
    """The layers of one part of a model, and its other parameters, which are on the device all through a step.

    Attributes:
        num_layers: on the device at a time, with those on their way.
    """

    def __init__(
        self,
        part: nn.Module,
        layers: Sequence[nn.Module],
        hosted: set[nn.Parameter],
        num_layers: int,
        device: torch.device,
    ) -> None:
        """Hook ``layers`` of ``part``, in the order of the forward pass; ``hosted`` parameters are in host memory."""
        self.num_layers = num_layers
        of_layers = [[one for one in layer.parameters() if one in hosted] for layer in layers]
        inside = {one for layer in of_layers for one in layer}
        self._layers = [Away(layer, device) for layer in of_layers]
        self._others = Away([one for one in part.parameters() if one in hosted and one not in inside], device)
        self._link = make_link(HostArena(torch.empty(0, dtype=torch.uint8)), device.type == "cuda")
        part.register_forward_pre_hook(self._before_part, prepend=True)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before_forward, number), prepend=True)
            layer.register_forward_hook(partial(self._after_forward, number))

    @property
    def device_bytes(self) -> int:
        """Device memory of the parameters that are there now."""
        return sum(one.num_bytes for one in (*self._layers, self._others) if one.is_here)

    def enter(self, number: int, step: int) -> None:
        """Have a layer on the device, and the next ones on their way; ``step``: 1 in a forward pass, -1 in backward."""
        first = number - (self.num_layers - 1 if step < 0 else 0)
        first = max(0, min(first, len(self._layers) - self.num_layers))  # at an end: those of the way back
        wanted = range(first, min(first + self.num_layers, len(self._layers)))
        for other, layer in enumerate(self._layers):
            if other not in wanted and layer.is_here:
                layer.release(self._link)
        self._layers[number].hold(self._link)
        for other in wanted[::step]:
            self._layers[other].fetch(self._link)

    def release(self) -> None:
        """Have no parameters on the device, because they are about to change."""
        for one in (*self._layers, self._others):
            if one.is_here:
                one.release(self._link)

    def _before_part(self, *_: object) -> None:
        self._others.hold(self._link)

    def _before_forward(self, number: int, *_: object) -> None:
        is_recomputed = torch._C._current_graph_task_id() != -1  # inside a backward pass
        self.enter(number, -1 if is_recomputed else 1)

    def _after_forward(self, number: int, _module: nn.Module, _inputs: object, output: object) -> None:
        """Have the layer return before its backward pass, which begins with the gradient of an output."""
        for one in output if isinstance(output, tuple) else (output,):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(partial(self._before_backward, number))

    def _before_backward(self, number: int, _gradient: torch.Tensor) -> None:
        self.enter(number, -1)
