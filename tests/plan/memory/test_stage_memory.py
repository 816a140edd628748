"""Device memory of stages, against the model's parameters and sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.memory.model_states import state_bytes
from bytescale_ext.plan.memory.stage_memory import StageMemory
from bytescale_ext.plan.step.sizes import Cluster

COST = shipped("bytescale_7b")
CLUSTER = Cluster(64, 8192)


def test_stages_share_layers_and_the_ends_of_the_model() -> None:
    """Without logits and working memory the stages hold all parameters once."""
    none = Cluster(64, 1)
    for num_stages in (1, 4, 8):
        memory = StageMemory.of(COST, num_stages, none)
        whole = state_bytes(COST.shape, 2, 1, 64)
        assert sum(memory.fixed_bytes) == pytest.approx(whole, rel=1e-4)
        assert memory.num_layers == (COST.shape.num_layers // num_stages,) * num_stages


def test_the_last_stage_holds_the_logits() -> None:
    first, *_, last = StageMemory.of(COST, 4, CLUSTER).fixed_bytes
    small = replace(COST, shape=replace(COST.shape, vocab=8))
    assert last - first == pytest.approx(StageMemory.of(small, 4, CLUSTER).fixed_bytes[-1] - first, abs=10e9)
    assert last > first


def test_bytes_of_a_token() -> None:
    layer = StageMemory.of(COST, 4, CLUSTER).layer
    shape = COST.shape
    assert layer.activations == COST.layer_bytes
    assert layer.keys == 2 * shape.num_kv_heads * shape.head_dim * 2
    assert layer.key_sums == 2 * layer.keys
    assert StageMemory.of(COST, 4, CLUSTER, element_bytes=4).layer.key_sums == 2 * layer.keys


def test_the_fullest_stage_counts() -> None:
    memory = replace(StageMemory.of(COST, 2, CLUSTER), num_layers=(7, 5), fixed_bytes=(10.0, 40.0))
    assert memory.most_bytes([4.0, 2.0]) == 50.0
    assert memory.most_bytes([8.0, 2.0]) == 66.0
