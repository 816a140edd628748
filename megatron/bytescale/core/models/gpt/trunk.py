"""The model below draft heads: access to its hidden states, and loading of a checkpoint without heads.

By default the model is frozen: none of its parameters and inputs requires gradients, so autograd records nothing. In a
pipeline the stages still exchange gradients, which are zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlock

HEADS = "draft_heads"
"""Name of the heads in Megatron's model and in checkpoints."""


class Trunk:
    """Hooks on one model chunk, and the tensors they record in a forward pass. ``is_frozen``: it is not trained.

    Attributes:
        chunk: model chunk of Megatron.
        hidden: hidden states [s, b, h] before the last norm in the current forward pass; None on stages without that
            norm.
        source: input from the previous stage in the current forward pass, [s, b, h]; None on the first stage.
    """

    def __init__(self, chunk: torch.nn.Module, is_frozen: bool = True) -> None:
        self.chunk = chunk
        self.is_frozen = is_frozen
        self.hidden: torch.Tensor | None = None
        self.source: torch.Tensor | None = None
        for parameter in chunk.parameters():
            parameter.requires_grad_(parameter.requires_grad and not is_frozen)
        chunk.register_forward_pre_hook(self._detach_source)
        chunk.register_forward_hook(self._link_source)
        norm = getattr(chunk.decoder, "final_layernorm", None)
        if norm is not None:
            norm.register_forward_pre_hook(self._note_hidden)

    def _detach_source(self, chunk: torch.nn.Module, inputs: tuple[object, ...]) -> None:
        decoder: TransformerBlock = chunk.decoder
        self.source = None if chunk.pre_process or not self.is_frozen else decoder.input_tensor
        if self.source is not None:
            decoder.set_input_tensor(self.source.detach())

    def _link_source(self, chunk: torch.nn.Module, inputs: tuple[object, ...], output: torch.Tensor) -> torch.Tensor:
        source, self.source, self.hidden = self.source, None, None
        if source is None:
            return output
        linked: torch.Tensor = _ZeroGradient.apply(output, source)
        return linked

    def _note_hidden(self, norm: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.hidden = inputs[0]


class _ZeroGradient(torch.autograd.Function):
    """Returns the output unchanged; in the backward pass, the input it came from gets a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, source: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.like = source.shape, source.dtype, source.device
        ctx.mark_dirty(output)  # return the output, not a view: Megatron frees it once sent
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        shape, dtype, device = ctx.like
        return grad, torch.zeros(shape, dtype=dtype, device=device)


@contextlib.contextmanager
def without_heads(chunk: torch.nn.Module) -> Iterator[None]:
    """Temporarily remove the heads from a model chunk, so that Megatron can read a checkpoint without heads.

    Megatron calls a model's ``hide_loss_modules`` when it starts a new run from a checkpoint.
    """
    heads = chunk._modules.pop(HEADS, None)
    try:
        yield
    finally:
        if heads is not None:
            chunk._modules[HEADS] = heads


def begin_as_last_layer(chunk: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str, *unused: object) -> None:
    """Complete a checkpoint without heads: their layers and norms are initialized from the model's last layer and norm.

    Other tensors of the heads keep their values. A state that contains any part of the heads is left unchanged. Tensors
    of ``state`` have any shape.
    """
    if any(name.startswith(f"{prefix}{HEADS}.") for name in state):
        return
    layers = chunk.get_submodule("decoder.layers")
    assert isinstance(layers, torch.nn.ModuleList), f"{type(layers)=}"
    last = f"{prefix}decoder.layers.{len(layers) - 1}"
    for name, value in chunk.get_submodule(HEADS).state_dict(prefix=f"{prefix}{HEADS}.").items():
        part, _, rest = name.removeprefix(f"{prefix}{HEADS}.").partition(".")
        origin = f"{last}.{rest}" if part.startswith("layer") else f"{prefix}decoder.final_layernorm.{rest}"
        copies = part.startswith("layer") or part in ("norm", "head_norm")
        state[name] = state[origin] if copies and origin in state else value
