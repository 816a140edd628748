from __future__ import annotations

from functools import partial

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from bytescale_ext.plan.experts.placement import PlacementPlan
from megatron.bytescale.core.transformer.moe.counted_layer import CountedMoELayer, TokenCounts, with_counts
from megatron.bytescale.core.transformer.moe.placed_layer import PlacedMoELayer, Placements, with_slots
from megatron.bytescale.core.transformer.moe.slot_experts import SlotExperts
from tests.bytescale.core.transformer.moe.test_counted_layer import layer_spec

STATIC = PlacementPlan.static(4, 2, 3)


def test_layers_follow_the_first_plan_until_they_have_their_own() -> None:
    placements = Placements(STATIC)
    other = PlacementPlan.static(4, 2, 3)
    placements.by_layer[5] = other
    assert placements.of(5) is other
    assert placements.of(6) is STATIC


def test_layers_that_count_get_slots() -> None:
    dense = layer_spec(torch.nn.Identity)
    modules = MoESubmodules(experts=partial(SequentialMLP, submodules="linear"))  # type: ignore[arg-type]
    sparse = layer_spec(partial(MoELayer, submodules=modules))
    block = TransformerBlockSubmodules(layer_specs=[dense, sparse, sparse])
    counts, placements = TokenCounts(), Placements(STATIC)
    assert with_slots(with_counts(block, counts), placements) is block
    assert dense.submodules.mlp is torch.nn.Identity
    mlp = sparse.submodules.mlp
    assert mlp.func is PlacedMoELayer
    assert issubclass(PlacedMoELayer, CountedMoELayer)
    assert mlp.keywords["placements"] is placements
    assert mlp.keywords["counts"] is counts
    assert mlp.keywords["submodules"].experts.func is SlotExperts
    assert mlp.keywords["submodules"].experts.keywords == {"submodules": "linear"}
    assert modules.experts.func is SequentialMLP  # type: ignore[attr-defined]
