"""What Megatron's layer specs have in common, whether they are of one layer or of a block."""

from __future__ import annotations

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def layers_of(spec: ModuleSpec | TransformerBlockSubmodules) -> list[ModuleSpec]:
    """Return the specs of the layers: one for all layers of a model, or one for each layer of a block."""
    return list(spec.layer_specs or []) if isinstance(spec, TransformerBlockSubmodules) else [spec]
