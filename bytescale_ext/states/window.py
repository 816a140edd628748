"""Window of layers on the device: parameters are in host memory, and are copied before the pass that needs them.

    layer      0 1 2 3 4 5 6 7
    forward    . . x x . . . .      layer 2 computes, layer 3 is being copied
    backward   . . . . x x . .      layer 5 computes, layer 4 is being copied

Passes do not change parameters, so a layer that leaves the window is dropped without a copy back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from bytescale_ext.activation.arena import HostArena
from bytescale_ext.activation.link import Link, Ticket, make_link


class HostedParameters:
    """Parameters in host memory that are copied to the device together.

    Attributes:
        on_device: whether the parameters are on the device or being copied to it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        """Remember ``parameters`` of any shape, which are in host memory."""
        self._host = {parameter: parameter.data for parameter in parameters}
        self._device = device
        self._copying: tuple[list[torch.Tensor], Ticket] | None = None
        self.on_device = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(host.nbytes for host in self._host.values())

    def fetch(self, link: Link) -> None:
        """Start copying the parameters to the device."""
        if not self.on_device:
            tensors = [torch.empty_like(host, device=self._device) for host in self._host.values()]
            self._copying = tensors, link.read(list(zip(tensors, self._host.values(), strict=True)), None)
            self.on_device = True

    def hold(self, link: Link) -> None:
        """Copy the parameters to the device, unless they are there, and make later work on the device wait for them."""
        self.fetch(link)
        if self._copying is not None:
            tensors, ticket = self._copying
            link.wait(ticket)
            for parameter, tensor in zip(self._host, tensors, strict=True):
                parameter.data = tensor
            self._copying = None

    def release(self, link: Link) -> None:
        """Free the parameters on the device."""
        if self._copying is not None:
            link.wait(self._copying[1])  # the memory is reused by later work, which must wait for the copy
            self._copying = None
        for parameter, host in self._host.items():
            parameter.data = host
        self.on_device = False


class LayerWindow:
    """Layers of one model chunk. Hosted parameters outside of layers are on the device throughout a step.

    Attributes:
        num_layers: number of layers on the device at a time, including layers that are being copied.
    """

    def __init__(
        self,
        part: nn.Module,
        layers: Sequence[nn.Module],
        hosted: set[nn.Parameter],
        num_layers: int,
        device: torch.device,
    ) -> None:
        """Hook a model chunk.

        Args:
            part: model chunk.
            layers: its layers in the order of the forward pass.
            hosted: parameters in host memory.
            num_layers: number of layers on the device at a time.
            device: device of the passes.
        """
        self.num_layers = num_layers
        by_layer = [[parameter for parameter in layer.parameters() if parameter in hosted] for layer in layers]
        in_layers = {parameter for parameters in by_layer for parameter in parameters}
        others = [parameter for parameter in part.parameters() if parameter in hosted and parameter not in in_layers]
        self._layers = [HostedParameters(parameters, device) for parameters in by_layer]
        self._others = HostedParameters(others, device)
        self._link = make_link(HostArena(torch.empty(0, dtype=torch.uint8)), device.type == "cuda")
        part.register_forward_pre_hook(self._before_part, prepend=True)
        part.register_forward_hook(self._after_part)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before_forward, number), prepend=True)
            layer.register_forward_hook(partial(self._after_forward, number))

    @property
    def device_bytes(self) -> int:
        """Bytes of hosted parameters that are on the device now."""
        return sum(hosted.num_bytes for hosted in (*self._layers, self._others) if hosted.on_device)

    def enter(self, number: int, step: int) -> None:
        """Move the window so that a layer is on the device and the next layers are being copied.

        ``step`` is 1 in a forward pass and -1 in a backward pass.
        """
        first = number - (self.num_layers - 1 if step < 0 else 0)
        first = max(0, min(first, len(self._layers) - self.num_layers))  # the window does not extend past either end
        inside = range(first, min(first + self.num_layers, len(self._layers)))
        for other, layer in enumerate(self._layers):
            if other not in inside and layer.on_device:
                layer.release(self._link)
        self._layers[number].hold(self._link)
        for other in inside[::step]:
            self._layers[other].fetch(self._link)

    def release(self) -> None:
        """Free all hosted parameters on the device, because the optimizer is about to change them."""
        self._release((*self._layers, self._others))

    def _release(self, parts: Iterable[HostedParameters]) -> None:
        for hosted in parts:
            if hosted.on_device:
                hosted.release(self._link)

    def _before_part(self, *_: object) -> None:
        self._others.hold(self._link)

    def _after_part(self, *_: object) -> None:
        """Free the layers after an evaluation: Megatron saves next, and needs equal layers in the same memory."""
        if not torch.is_grad_enabled():
            self._release(self._layers)

    def _before_forward(self, number: int, *_: object) -> None:
        is_recomputed = torch._C._current_graph_task_id() != -1  # inside a backward pass
        self.enter(number, -1 if is_recomputed else 1)

    def _after_forward(self, number: int, _module: nn.Module, _inputs: object, output: object) -> None:
        """Hook the outputs of a layer: its backward pass starts with the gradient of an output."""
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, number))

    def _before_backward(self, number: int, _gradient: torch.Tensor) -> None:
        self.enter(number, -1)
