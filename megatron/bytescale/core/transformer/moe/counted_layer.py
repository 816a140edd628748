"""Layers of experts that count the tokens per expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.bytescale.core.transformer.moe.latent_layer import LatentMoELayer
from megatron.bytescale.core.transformer.spec_utils import layers_of

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class Numbered(Protocol):
    """A router or a layer of experts. Megatron numbers layers of multi-token prediction from 1 again."""

    config: TransformerConfig
    layer_number: int | None
    is_mtp_layer: bool


def number_in_model(module: Numbered) -> int:
    """Return the number of a module's layer. Layers of multi-token prediction count on from the model's layers."""
    assert module.layer_number is not None
    return module.layer_number + module.config.num_layers * module.is_mtp_layer


@dataclass
class TokenCounts:
    """Number of tokens per expert in the current step, on this process.

    Attributes:
        by_layer: layer number in the model -> counts [experts] of each forward pass of the layer.
        at_step_end: functions that receive the loads of all ranks at the end of a step.
    """

    by_layer: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    at_step_end: list[Callable[[Any], None]] = field(default_factory=list)

    def note(self, layer: int, chosen: torch.Tensor) -> None:
        """Add the tokens of a micro-batch. ``chosen``: bool [tokens, experts]."""
        self.by_layer.setdefault(layer, []).append(chosen.sum(0))

    @property
    def num_passes(self) -> int:
        """Number of forward passes of a layer so far; the most, because a layer of later tokens may be repeated."""
        return max(map(len, self.by_layer.values()), default=0)

    def take(self) -> tuple[list[int], torch.Tensor | None]:
        """Return the layer numbers and their counts [layers, experts] (None without layers), and reset the counts."""
        layers = sorted(self.by_layer)
        counts = torch.stack([torch.stack(self.by_layer[layer]).sum(0) for layer in layers]) if layers else None
        self.by_layer.clear()
        return layers, counts


class CountedMoELayer(LatentMoELayer):
    """Megatron's layer of experts; given ``counts``, it records its router's choices in training.

    A forward pass that will be recomputed runs without gradients and is not counted; its recomputation is counted.
    """

    def __init__(self, *args: object, counts: TokenCounts | None = None, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.counts = counts

    def route(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route hidden states [rows, b, hidden]; return probabilities and choices, both [tokens, experts]."""
        probs, chosen = super().route(hidden_states, padding_mask)
        if self.counts is not None and self.training and torch.is_grad_enabled():
            self.counts.note(number_in_model(self), chosen)
        return probs, chosen


def with_counts(
    spec: ModuleSpec | TransformerBlockSubmodules, counts: TokenCounts
) -> ModuleSpec | TransformerBlockSubmodules:
    """Make the layers of experts count tokens, in a new spec of a block or a layer."""
    for layer in layers_of(spec):
        mlp = layer.submodules.mlp
        if getattr(mlp, "func", None) in (MoELayer, LatentMoELayer):
            layer.submodules.mlp = partial(CountedMoELayer, *mlp.args, **mlp.keywords, counts=counts)
    return spec
