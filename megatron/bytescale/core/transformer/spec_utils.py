"""Functions on Megatron's specs of a layer or of a block."""

from __future__ import annotations

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules


def layers_of(spec: ModuleSpec | TransformerBlockSubmodules) -> list[ModuleSpec]:
    """Return the specs of the layers: a single spec for all layers, or one spec for each layer of a block."""
    return list(spec.layer_specs or []) if isinstance(spec, TransformerBlockSubmodules) else [spec]


def has_experts(layer: TransformerLayerSubmodules) -> bool:
    """Return whether a layer's modules have experts, of Megatron's class or of a class of ours."""
    kind = getattr(layer.mlp, "func", None)
    return isinstance(kind, type) and issubclass(kind, MoELayer)
