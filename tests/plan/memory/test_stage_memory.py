"""Device memory of stages, against the model's parameters and sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.activation.load import LayerSettings
from bytescale_ext.plan.activation.operators import LayerOperators
from bytescale_ext.plan.memory.stage_memory import LayerBytes, PassBytes, StageMemory, head_bytes
from bytescale_ext.plan.setup.setup import equal_layers
from bytescale_ext.plan.step.sizes import Cluster

COST = shipped("bytescale_7b")
CLUSTER = Cluster(64, 8192)


def test_bytes_of_a_token() -> None:
    layer = StageMemory.of(COST, equal_layers(COST.shape, 4), CLUSTER, LayerSettings()).layer
    shape = COST.shape
    assert layer.activations == COST.layer_bytes
    assert layer.keys == 2 * shape.num_kv_heads * shape.head_dim * 2
    assert layer.key_sums == 2 * layer.keys
    assert (
        StageMemory.of(COST, equal_layers(COST.shape, 4), CLUSTER, LayerSettings(element_bytes=4)).layer.key_sums
        == 2 * layer.keys
    )


def test_the_fullest_stage_counts() -> None:
    memory = StageMemory(LayerBytes(1.0, 1.0, 1.0), (7, 5), state_bytes=(8.0, 30.0), working_bytes=(2.0, 10.0))
    assert memory.most_bytes([4.0, 2.0]) == 50.0
    assert memory.most_bytes([8.0, 2.0]) == 66.0
    assert memory.without_states().most_bytes([8.0, 2.0]) == 58.0


def test_a_layer_that_is_computed_again_exists_once() -> None:
    kept, tokens = 100.0, 8192
    memory = StageMemory.of(COST, equal_layers(COST.shape, 4), CLUSTER, LayerSettings())
    again = memory.recomputing(kept)
    assert again.layer.activations == kept
    assert again.working_bytes[0] == pytest.approx(memory.working_bytes[0] + tokens * (COST.layer_bytes - kept))
    assert again.working_bytes[-1] == max(memory.working_bytes[-1], again.working_bytes[0])
    assert again.state_bytes == memory.state_bytes


def test_slices_compute_a_layer_again_for_their_own_tokens() -> None:
    memory = StageMemory.of(COST, equal_layers(COST.shape, 4), CLUSTER, LayerSettings())
    again = memory.recomputing(100.0)

    def working(of: StageMemory, stage: int, tokens: float) -> tuple[float, float]:
        forward, backward = of.working(stage, np.array([tokens]), np.array([8192.0]))
        return float(forward[0]), float(backward[0])

    assert working(again, 0, 8192) == (0.0, again.working_bytes[0])
    assert working(again, 0, 2048)[1] == pytest.approx(working(memory, 0, 2048)[1] + 2048 * (COST.layer_bytes - 100.0))
    assert working(again, 3, 2048)[1] == max(working(memory, 3, 2048)[1], working(again, 0, 2048)[1])
    logits = memory.working_bytes[-1] / 4
    assert working(memory, 3, 2048) == (logits, logits)


def test_whole_micro_batches_keep_no_keys_for_later_slices() -> None:
    memory = StageMemory.of(COST, equal_layers(COST.shape, 4), CLUSTER, LayerSettings())
    sliced, whole = memory.recomputing(100.0, sliced=True), memory.recomputing(100.0)
    assert sliced.layer.activations == 100.0 + memory.layer.keys
    assert sliced.working_bytes[0] == pytest.approx(whole.working_bytes[0] - 8192 * memory.layer.keys)
    assert sliced.unsliced() == whole
    assert whole.unsliced() is whole


def test_attention_of_a_slice_has_gradients_of_all_keys_before_it() -> None:
    passes = PassBytes(100, hidden=1.0, in_mlp=4.0, of_keys=2.0, logits=50.0, loss_tokens=20, buffer=1.0)
    tokens, attended = np.array([100.0, 10.0]), np.array([100.0, 60.0])
    assert passes.of_backward(tokens, attended, has_loss=False).tolist() == [3 * 100 + 2 * 100, 3 * 10 + 2 * 60]
    assert passes.of_backward(tokens, attended, has_loss=True).tolist() == [20 * 50, 10 * 50]
    assert passes.of_loss(tokens).tolist() == [20 * 50, 10 * 50]
    assert passes.of_full(2) == (3 * 100 + 2 * 100 + 100, 20 * 50 + 100)
    again = replace(passes, of_keys=0.0, again=6.0, message=2.0, num_messages=3)
    assert again.of_backward(tokens, attended, has_loss=False).tolist() == [100 * (4 + 6 + 6), 10 * (4 + 6 + 6)]


def test_tensor_parallel_ranks_gather_into_a_buffer() -> None:
    two = replace(COST, tensor_parallel=2)
    how = [LayerSettings(sequence_parallel=shared) for shared in (True, False)]
    with_buffer, without = (StageMemory.of(two, (4, 4), CLUSTER, one) for one in how)
    whole = 8192 * COST.shape.hidden * 2
    assert with_buffer.working_bytes[0] - without.working_bytes[0] == whole - 2 * whole / 2  # gradients are shared
    assert StageMemory.of(COST, (4, 4), CLUSTER, how[0]) == StageMemory.of(COST, (4, 4), CLUSTER, how[1])


def test_messages_of_virtual_stages_travel_beside_passes() -> None:
    memory = StageMemory.of(COST, equal_layers(COST.shape, 4), CLUSTER, LayerSettings())
    more = memory.with_virtual_stages()
    messages = 4 * 8192 * COST.shape.hidden * 2
    assert more.working_bytes == tuple(each + messages for each in memory.working_bytes)
    assert more.recomputing(100.0).working_bytes[0] == memory.recomputing(100.0).working_bytes[0] + messages


def test_what_is_behind_the_layers() -> None:
    shape = COST.shape
    assert head_bytes(shape, 2, 2, chunked_loss=False) == 4 * shape.hidden + 2 * shape.vocab
    assert head_bytes(shape, 2, 2, chunked_loss=True) == 4 * shape.hidden
    in_parts = LayerOperators(split_norms=True)
    assert head_bytes(shape, 2, 4, True, in_parts) == 3 * 4 * shape.hidden + 4
    how = LayerSettings(element_bytes=4, loss_tokens=512, operators=in_parts)
    assert StageMemory.of(COST, (4, 4), CLUSTER, how).layer.head == 3 * 4 * shape.hidden + 4


def test_angles_are_held_once_where_layers_are_computed_again() -> None:
    memory = StageMemory.of(COST, (6, 2), CLUSTER, LayerSettings(operators=LayerOperators(angles=128)))
    again = memory.recomputing(100.0)
    assert [memory.token_bytes(stage) for stage in (0, 1)] == [COST.layer_bytes] * 2
    assert [again.num_layers[stage] * again.token_bytes(stage) for stage in (0, 1)] == [600 + 512, 200 + 512]
