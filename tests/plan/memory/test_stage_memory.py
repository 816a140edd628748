"""Device memory of stages, against the model's parameters and sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.evaluate.schedulers import equal_layers
from bytescale_ext.plan.memory.model_states import state_bytes
from bytescale_ext.plan.memory.stage_memory import LayerBytes, StageMemory
from bytescale_ext.plan.step.sizes import Cluster

COST = shipped("bytescale_7b")
CLUSTER = Cluster(64, 8192)


def test_stages_share_layers_and_the_ends_of_the_model() -> None:
    for num_stages in (1, 4, 8):
        memory = StageMemory.of(COST, equal_layers(COST, num_stages), CLUSTER)
        assert sum(memory.state_bytes) == pytest.approx(state_bytes(COST.shape, 2, 1, 64), rel=1e-12)
        assert memory.num_layers == (COST.shape.num_layers // num_stages,) * num_stages


def test_the_last_stage_holds_the_logits() -> None:
    first, *_, last = StageMemory.of(COST, equal_layers(COST, 4), CLUSTER).working_bytes
    assert last == 8192 * 6 * COST.shape.vocab > first
    small = replace(COST, shape=replace(COST.shape, vocab=8))
    assert StageMemory.of(small, equal_layers(small, 4), CLUSTER).working_bytes == (first,) * 4


def test_bytes_of_a_token() -> None:
    layer = StageMemory.of(COST, equal_layers(COST, 4), CLUSTER).layer
    shape = COST.shape
    assert layer.activations == COST.layer_bytes
    assert layer.keys == 2 * shape.num_kv_heads * shape.head_dim * 2
    assert layer.key_sums == 2 * layer.keys
    assert StageMemory.of(COST, equal_layers(COST, 4), CLUSTER, element_bytes=4).layer.key_sums == 2 * layer.keys


def test_the_fullest_stage_counts() -> None:
    memory = StageMemory(LayerBytes(1.0, 1.0, 1.0), (7, 5), state_bytes=(8.0, 30.0), working_bytes=(2.0, 10.0))
    assert memory.most_bytes([4.0, 2.0]) == 50.0
    assert memory.most_bytes([8.0, 2.0]) == 66.0
    assert memory.without_states().most_bytes([8.0, 2.0]) == 58.0


def test_a_layer_that_is_computed_again_exists_once() -> None:
    kept, tokens = 100.0, 8192
    memory = StageMemory.of(COST, equal_layers(COST, 4), CLUSTER)
    again = memory.recomputing(kept, tokens)
    assert again.layer.activations == kept
    assert again.working_bytes[0] == memory.working_bytes[0] + tokens * (COST.layer_bytes - kept)
    assert again.working_bytes[-1] == max(memory.working_bytes[-1], again.working_bytes[0])
    assert again.state_bytes == memory.state_bytes


def test_slices_compute_a_layer_again_for_their_own_tokens() -> None:
    memory = StageMemory.of(COST, equal_layers(COST, 4), CLUSTER)
    again = memory.recomputing(100.0, 8192)
    assert again.running(8192) == again
    slices = again.running(2048)
    assert slices.working_bytes[0] == memory.working_bytes[0] + 2048 * (COST.layer_bytes - 100.0)
    assert slices.working_bytes[-1] == max(memory.working_bytes[-1], slices.working_bytes[0])
    assert slices.layer == again.layer
    assert memory.running(2048) == memory  # gradients of keys are those of whole documents
