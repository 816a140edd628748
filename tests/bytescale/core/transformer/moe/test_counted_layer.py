from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.bytescale.core.transformer.moe.counted_layer import CountedMoELayer, TokenCounts, with_counts


def test_micro_batches_add_up_by_layer() -> None:
    counts = TokenCounts()
    chosen = torch.tensor([[True, False, True], [True, False, False]])
    counts.note(4, chosen)
    counts.note(2, ~chosen)
    counts.note(4, chosen)
    assert counts.num_passes == 2
    layers, found = counts.take()
    assert layers == [2, 4]
    assert found is not None
    assert found.tolist() == [[0, 2, 1], [4, 0, 2]]
    assert counts.take() == ([], None)
    assert counts.num_passes == 0


def layer_spec(mlp: object) -> ModuleSpec:
    return ModuleSpec(module=torch.nn.Identity, submodules=SimpleNamespace(mlp=mlp))


def test_only_layers_of_experts_are_changed() -> None:
    counts = TokenCounts()
    dense = partial(MLP, submodules="dense")
    sparse, same = layer_spec(partial(MoELayer, submodules="experts")), layer_spec(dense)
    block = TransformerBlockSubmodules(layer_specs=[same, sparse, sparse])  # Megatron repeats one object
    changed = with_counts(block, counts)
    assert changed is block
    assert same.submodules.mlp is dense
    mlp = sparse.submodules.mlp
    assert mlp.func is CountedMoELayer
    assert mlp.keywords == {"submodules": "experts", "counts": counts}


def test_a_layer_alone_is_changed() -> None:
    spec = layer_spec(partial(MoELayer, submodules="experts"))
    assert with_counts(spec, TokenCounts()) is spec
    assert spec.submodules.mlp.func is CountedMoELayer
