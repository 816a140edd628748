"""Specs of the layers of a model, in all forms of Megatron."""

from __future__ import annotations

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.bytescale.core.transformer.spec_utils import layers_of


def test_a_layer_is_itself() -> None:
    layer = ModuleSpec(module=object)
    assert layers_of(layer) == [layer]


def test_a_block_has_its_layers_not_copies() -> None:
    layers = [ModuleSpec(module=object), ModuleSpec(module=object)]
    assert [*map(id, layers_of(TransformerBlockSubmodules(layer_specs=layers)))] == [*map(id, layers)]
    assert layers_of(TransformerBlockSubmodules()) == []
