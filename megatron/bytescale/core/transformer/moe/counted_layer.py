"""Layers of experts that count the tokens of each expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.bytescale.core.transformer.spec_utils import layers_of


@dataclass
class TokenCounts:
    """Tokens of each expert in the running step, of this process.

    Attributes:
        by_layer: number of the layer -> [experts] of each of its forward passes.
        at_step_end: what is done with the loads of all ranks.
    """

    by_layer: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    at_step_end: list[Callable[[Any], None]] = field(default_factory=list)

    def note(self, layer: int, chosen: torch.Tensor) -> None:
        """Add the tokens of a micro-batch. ``chosen``: bool [tokens, experts]."""
        self.by_layer.setdefault(layer, []).append(chosen.sum(0))

    @property
    def num_passes(self) -> int:
        """Forward passes of each layer so far, equally many in all."""
        return max(map(len, self.by_layer.values()), default=0)

    def take(self) -> tuple[list[int], torch.Tensor | None]:
        """Return the layers and their counts [layers, experts], None without layers, and begin again."""
        layers = sorted(self.by_layer)
        counts = torch.stack([torch.stack(self.by_layer[layer]).sum(0) for layer in layers]) if layers else None
        self.by_layer.clear()
        return layers, counts


class CountedMoELayer(MoELayer):
    """Megatron's layer of experts, which notes what its router has chosen for training if it is given ``counts``.

    A forward pass that will be recomputed runs without gradients and is not counted; the recomputation is.
    """

    def __init__(self, *args: object, counts: TokenCounts | None = None, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.counts = counts

    def route(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route hidden states [rows, b, hidden]: return probabilities and choices, [tokens, experts] both."""
        probs, chosen = super().route(hidden_states, padding_mask)
        if self.counts is not None and self.training and torch.is_grad_enabled():
            assert self.layer_number is not None
            self.counts.note(self.layer_number, chosen)
        return probs, chosen


def with_counts(
    spec: ModuleSpec | TransformerBlockSubmodules, counts: TokenCounts
) -> ModuleSpec | TransformerBlockSubmodules:
    """Change a new spec of a block or a layer: its layers of experts count tokens."""
    for layer in layers_of(spec):
        mlp = layer.submodules.mlp
        if getattr(mlp, "func", None) is MoELayer:
            layer.submodules.mlp = partial(CountedMoELayer, *mlp.args, **mlp.keywords, counts=counts)
    return spec
