from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.activation.load import LayerSettings
from bytescale_ext.plan.evaluate.slicing_choice import full_micro_batches
from bytescale_ext.plan.memory.first_layers import FirstLayers
from bytescale_ext.plan.memory.held import peak_memory
from bytescale_ext.plan.memory.stage_memory import StageMemory
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing
from tests.plan.search.tasks import COST

TOKENS, LAYERS, INPUT = 1024, 4, 256.0
TABLE = full_micro_batches(6, TOKENS)
KEPT = replace(StageMemory.of(COST, (LAYERS, LAYERS), Cluster(2, TOKENS), LayerSettings()), state_bytes=(1e6, 2e6))
COSTS = COST.stage(LAYERS).both


@pytest.mark.parametrize("slicing", [ONE_SLICE, Slicing(4)])
@pytest.mark.parametrize(("count", "same"), [(0, "kept"), (LAYERS, "again"), (LAYERS + 1, "again")])
def test_no_layer_and_all_layers(count: int, same: str, slicing: Slicing) -> None:
    blocks = FirstLayers(KEPT, KEPT.recomputing(INPUT, sliced=True), count)
    memory = getattr(blocks, same)
    expected = peak_memory(TABLE, slicing, COSTS, memory).stage_parts(memory)
    found = blocks.parts(TABLE, slicing, COSTS, 1)
    assert [stage.total for stage in found] == pytest.approx([stage.total for stage in expected])


def test_a_layer_that_runs_again_finds_the_last_layers_free() -> None:
    """One stage, one micro-batch: a recomputed layer holds its own activations, and inputs of the other ones."""
    one = replace(KEPT, num_layers=(LAYERS,), state_bytes=(0.0,), working_bytes=KEPT.working_bytes[-1:])
    assert one.passes is not None
    one = replace(one, passes=replace(one.passes, logits=0.0, hidden=0.0, in_mlp=0.0, of_keys=0.0))
    (found,) = FirstLayers(one, one.recomputing(INPUT), LAYERS - 1).parts(TABLE, ONE_SLICE, COSTS, 1)
    at_last_layer = (LAYERS - 1) * INPUT + one.layer.activations
    again = (LAYERS - 2) * INPUT + one.layer.activations
    assert found.total == pytest.approx(TOKENS * max(at_last_layer, again))
