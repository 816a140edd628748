from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.activation.load import LayerSettings
from bytescale_ext.plan.activation.operators import FUSED, LayerOperators
from bytescale_ext.plan.memory.stage_memory import StageMemory
from bytescale_ext.plan.search.costed import CostedStrategy, setup_of_strategy
from bytescale_ext.plan.search.space import Space, blocks, fewest_recomputed
from bytescale_ext.plan.search.strategy import BLOCK, FULL, Strategy
from bytescale_ext.plan.step.sizes import Cluster
from tests.plan.search.tasks import COST, SHAPE, small_task

TASK = small_task()


def test_a_recomputed_layer_keeps_its_input_and_in_slices_keys() -> None:
    keys = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 2
    memory = StageMemory.of(COST, (3, 3), Cluster(2, 8), LayerSettings())
    for sliced, more in ((False, 0), (True, keys)):
        assert memory.recomputing(COST.recompute_bytes, sliced).layer.activations == COST.recompute_bytes + more


@pytest.mark.parametrize("operators", [FUSED, LayerOperators(angles=16)])
@pytest.mark.parametrize("stage_layers", [(6,), (3, 3), (4, 2)])
def test_as_few_layers_as_the_memory_needs(stage_layers: tuple[int, ...], operators: LayerOperators) -> None:
    kept, task = Strategy(1, stage_layers, 1024, shares_optimizer=True), replace(TASK, operators=operators)
    full = CostedStrategy.of(task, replace(kept, activations=FULL)).full_bytes[0]
    all_layers = replace(kept, activations=BLOCK, recomputed_layers=max(stage_layers))
    assert CostedStrategy.of(task, all_layers).full_bytes[0] == full
    whole, seen = CostedStrategy.of(task, kept).full_bytes[0], set()
    counts = range(1, max(stage_layers) + 1)
    blocks_of = [replace(kept, activations=BLOCK, recomputed_layers=count) for count in counts]
    needed = [CostedStrategy.of(task, block).full_bytes[0] for block in blocks_of]
    for device_bytes in np.linspace(0.9 * full, 1.1 * whole, 60):
        setup = setup_of_strategy(task, kept)
        number = fewest_recomputed(replace(setup, budget=replace(setup.budget, device_bytes=device_bytes)))
        fitting = [count for count, each in zip(counts, needed, strict=True) if each <= device_bytes]
        best = 0 if whole <= device_bytes else min(fitting, default=None)
        assert number == best, device_bytes
        seen.add(number)
    assert {None, 0} < seen


def test_the_space_has_blocks_where_memory_is_short() -> None:
    kept = Strategy(1, (6,), 1024, shares_optimizer=True)
    whole = CostedStrategy.of(TASK, kept).full_bytes[0]
    assert list(blocks(TASK, replace(kept, activations=FULL))) == []
    tight = small_task(memory_bytes=whole - 4e6)
    (block,) = blocks(tight, replace(kept, activations=FULL))
    assert 0 < block.recomputed_layers < 6
    assert block in list(Space(stages=(1,), tokens_per_rank=(1024,)).strategies(tight))
    case, full = CostedStrategy.of(tight, block), CostedStrategy.of(tight, replace(kept, activations=FULL))
    assert full.full_bytes[0] < case.full_bytes[0] <= tight.devices.memory_bytes
    seconds = [one.run(TASK.steps[0]).time.compute for one in (CostedStrategy.of(TASK, kept), case, full)]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1] < seconds[2]
