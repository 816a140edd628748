"""Layers, widths and experts that cannot be divided among ranks name the flag."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from megatron.bytescale.arguments.divisions import Divisions
from tests.sample import sampled

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
PER, NUMBER = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def divisions(**given: Any) -> Divisions:
    """Return 8 layers on 4 stages, with changes."""
    sizes = {"num_layers": 8, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4}
    names = {field.name: None for field in fields(Divisions)} | sizes | {"expert_model_parallel_size": 1}
    return Divisions(**{**names, EMBEDDING: False, LOSS: False, **given})


RIGHT: list[dict[str, Any]] = [
    {},
    {"num_layers": 6, EMBEDDING: True, LOSS: True},
    {FIRST: 1, LAST: 1},
    {FIRST: 2},
    {FIRST: 2, NUMBER: 2},
    {"pipeline_model_parallel_size": 2, FIRST: 5, LAST: 3},
    {FIRST: 2, LAST: 2, NUMBER: 1},
    {"num_layers": 16, FIRST: 4, LAST: 4, NUMBER: 2},
    {PER: 1},
    {NUMBER: 2},
    {"pipeline_model_parallel_layout": "Et|L", "num_layers": 7},
    {"num_layers": None},
    {"ffn_hidden_size": 48, "tensor_model_parallel_size": 4},
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_layers": 7}, "--num-layers 7 must be a multiple of --pipeline-model-parallel-size 4"),
    ({"num_layers": 7, LOSS: True, EMBEDDING: True}, "--num-layers 7 + 1 (--account-for-embedding-in-pipeline-split)"),
    ({FIRST: 9}, "--num-layers 8 less --decoder-first-pipeline-num-layers 9 leaves -1 layers for 3 other stages"),
    ({FIRST: 6}, "leaves 2 layers for 3 other stages"),
    ({FIRST: 1}, "leaves 7 layers for 3 other stages"),
    ({"pipeline_model_parallel_size": 2, FIRST: 8}, "leaves 0 layers for 1 other stages"),
    ({"pipeline_model_parallel_size": 2, FIRST: 1, LAST: 1}, "leaves 6 layers for 0 other stages"),
    ({FIRST: 0}, "--decoder-first-pipeline-num-layers 0 must be at least 1"),
    ({"num_layers": 11, FIRST: 2, NUMBER: 2}, "leaves 9 layers for 3 other stages of 2 virtual stages each"),
    ({FIRST: 3, LAST: 1, NUMBER: 2}, "--decoder-first-pipeline-num-layers 3 must be a multiple of --num-virtual"),
    ({FIRST: 2, PER: 1}, "give --num-virtual-stages-per-pipeline-rank in place of"),
    ({PER: 3}, "--num-layers-per-virtual-pipeline-stage 3 must divide the 2 layers of a stage"),
    ({NUMBER: 4}, "--num-virtual-stages-per-pipeline-rank 4 must divide the 2 layers of a stage"),
    ({NUMBER: 0}, "--num-virtual-stages-per-pipeline-rank 0 must divide"),
    ({"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size 0 must be at least 1"),
    ({"ffn_hidden_size": 49, "tensor_model_parallel_size": 2}, "--ffn-hidden-size 49 must be a multiple of --tensor"),
    ({"num_experts": 3, "expert_model_parallel_size": 2}, "--num-experts 3 must be a multiple of --expert-model"),
]


@pytest.mark.parametrize("given", RIGHT, ids=str)
def test_sizes_that_can_be_divided(given: dict[str, Any]) -> None:
    assert list(divisions(**given).wrong()) == []


@pytest.mark.parametrize(("given", "reason"), sampled(WRONG, WRONG[:4]), ids=str)
def test_sizes_that_cannot_be_divided(given: dict[str, Any], reason: str) -> None:
    assert any(reason in line for line in divisions(**given).wrong())
