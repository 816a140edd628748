"""Sizes, costs and ranks from Megatron's arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.measure.cost_file import write_cost
from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.cost.model_shape import LatentShape
from bytescale_ext.plan.setup.messages import devices_of
from bytescale_ext.plan.setup.setup import setup_of_cost
from bytescale_ext.plan.step.sizes import Cluster
from megatron.bytescale.arguments.model_shape import (
    cluster,
    hdp_rank_of,
    measured_cost,
    model_shape,
    ranks_of_a_node,
    stage_layers,
    stage_of,
)
from tests.plan.search.tasks import COST

ARGS = SimpleNamespace(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=48,
    swiglu=True,
    quick_geglu=False,
    padded_vocab_size=128,
    num_experts=None,
    window_size=None,
    window_attn_skip_freq=None,
    multi_latent_attention=False,
    transformer_impl="local",
    recompute_granularity=None,
    recompute_modules=["core_attn"],
    mtp_num_layers=None,
)


def test_model_shape_with_and_without_query_groups() -> None:
    shape = model_shape(ARGS)
    assert (shape.num_kv_heads, shape.num_heads, shape.head_dim, shape.gated) == (2, 4, 8, True)
    # Megatron's num_query_groups is 1 if it is not used.
    plain = SimpleNamespace(**{**vars(ARGS), "group_query_attention": False, "num_query_groups": 1, "swiglu": False})
    shape = model_shape(plain)
    assert shape.num_kv_heads == 4
    assert shape.gated is False
    assert model_shape(SimpleNamespace(**{**vars(plain), "quick_geglu": True})).gated, "gpt-oss has gates too"


SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}


def test_model_shape_with_latent_attention_and_later_layers() -> None:
    sizes = {"kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "qk_layernorm": True}
    given = {**vars(ARGS), **sizes, "multi_latent_attention": True, "q_lora_rank": None, "group_query_attention": False}
    shape = model_shape(SimpleNamespace(**given))
    assert (shape.head_dim, shape.num_kv_heads, shape.value_dim) == (12, 4, 6)
    assert shape.latent == LatentShape(0, 16, 4, 6, True)
    for changed in ({"transformer_impl": "transformer_engine"}, SELECTIVE):  # attention cannot project them itself
        one = model_shape(SimpleNamespace(**{**given, **changed})).latent
        assert one == LatentShape(0, 16, 4, 6, True, is_plain=False)
    assert model_shape(SimpleNamespace(**{**given, "q_lora_rank": 12})).latent == LatentShape(12, 16, 4, 6, True)
    assert (model_shape(ARGS).latent, model_shape(ARGS).later_layers) == (None, 0)
    assert model_shape(SimpleNamespace(**{**vars(ARGS), "mtp_num_layers": 2})).later_layers == 2


@pytest.mark.parametrize(("pattern", "is_sparse"), [(1, True), (2, False), ([0, 1], True), ([1, 0], False)])
def test_later_layers_are_like_the_last_layer(pattern: int | list[int], is_sparse: bool) -> None:
    """As in Megatron, the first of two layers has experts with the pattern 2."""
    experts = {"num_experts": 4, "moe_layer_freq": pattern, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
    given = {**vars(ARGS), **experts, "moe_shared_expert_intermediate_size": None, "mtp_num_layers": 1}
    shape = model_shape(SimpleNamespace(**given))
    assert (shape.later_layers, shape.later_experts) == (1, is_sparse)


@pytest.mark.parametrize(("pattern", "num_layers"), [(1, 2), (2, 1), ([0, 1], 1), ([1, 1], 2)])
def test_model_shape_with_experts(pattern: Any, num_layers: int) -> None:
    given = {"num_experts": 8, "moe_layer_freq": pattern, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
    args = SimpleNamespace(**{**vars(ARGS), **given, "moe_shared_expert_intermediate_size": None})
    shape = model_shape(args)
    assert (shape.num_expert_layers, shape.expert_ffn_hidden, shape.num_experts) == (num_layers, 48, 8)
    args.moe_shared_expert_intermediate_size = 10
    assert (model_shape(args).expert_ffn_hidden, model_shape(args).shared_ffn_hidden) == (58, 10)
    assert (model_shape(args).expert_latent, model_shape(args).token_width) == (0, 32)
    args.moe_latent_size = 12
    assert (model_shape(args).expert_latent, model_shape(args).token_width) == (12, 12)


@pytest.mark.parametrize(("frequency", "num_layers"), [(None, 2), (2, 1), (1, 0), ([0, 1], 1), ([0, 0], 0)])
def test_model_shape_with_windows(frequency: Any, num_layers: int) -> None:
    shape = model_shape(SimpleNamespace(**{**vars(ARGS), "window_size": (7, 0), "window_attn_skip_freq": frequency}))
    assert shape.num_window_layers == num_layers
    assert shape.window == (7 if num_layers else None)


def test_costs_are_of_this_model(tmp_path: Path) -> None:
    shape = model_shape(ARGS)
    path = tmp_path / "cost.json"
    given = {"cost_file": path, "params_dtype": torch.bfloat16, "tensor_model_parallel_size": 1}
    args = SimpleNamespace(**vars(ARGS), **given)
    with pytest.raises(ValueError, match=r"cost\.json"):
        measured_cost(args, shape)
    cost = cost_of_rates(shape, 1e12, 1e12, 1e12)
    write_cost(path, cost)
    assert measured_cost(args, shape) == cost
    args.hidden_size = 64
    with pytest.raises(ValueError, match="hidden"):
        measured_cost(args, model_shape(args))
    args.cost_file = None
    assert measured_cost(args, shape) is None


def test_ranks_share_out_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    sizes = {"world_size": 16, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
             "context_parallel_size": 2, "micro_batch_size": 3, "seq_length": 128, "hdp_tokens_per_rank": None,
             "hdp_ranks_per_node": None, "hdp_hierarchical_rings": None, "use_tp_pp_dp_mapping": False}  # fmt: skip
    args = SimpleNamespace(**sizes)
    assert cluster(args) == Cluster(4, 192)
    args.hdp_tokens_per_rank, args.hdp_ranks_per_node = 64, 2
    assert cluster(args) == Cluster(4, 64, 2)
    args.hdp_hierarchical_rings = "off"
    assert cluster(args) == Cluster(4, 64, 2, "off")


def test_the_launcher_tells_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for local, expected in (("2", 2), ("4", None), ("3", None), ("", None)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local or "0")
        assert ranks_of_a_node(1, 4) == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (ranks_of_a_node(2, 4), ranks_of_a_node(3, 4)) == (2, None)


PIPELINE = {
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "given", "layers"),
    [
        (8, 2, {}, (4, 4)),
        (8, 1, {}, (8,)),
        (8, 2, {"decoder_first_pipeline_num_layers": 7}, (7, 1)),
        (8, 3, {"decoder_last_pipeline_num_layers": 2}, (3, 3, 2)),
        (12, 4, {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}, (1, 4, 4, 3)),
        (
            6,
            4,
            {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
            (1, 2, 2, 1),
        ),
        (7, 4, {"account_for_loss_in_pipeline_split": True}, (2, 2, 2, 1)),
        (8, 2, {"pipeline_model_parallel_layout": "E|t*8L"}, (0, 8)),
        (8, 2, {"pipeline_model_parallel_layout": "Et*3|t*2|tt|tL"}, (5, 3)),
    ],
)
def test_layers_of_stages_are_those_that_megatron_builds(
    num_layers: int, num_stages: int, given: dict[str, Any], layers: tuple[int, ...]
) -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    args = SimpleNamespace(num_layers=num_layers, pipeline_model_parallel_size=num_stages, **PIPELINE | given)
    assert stage_layers(args) == layers
    if args.pipeline_model_parallel_layout is not None:  # Megatron counts these only on the running rank
        assert sum(layers) == num_layers
        return
    names = {
        "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
        "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    }
    config = TransformerConfig(
        num_layers=num_layers, hidden_size=8, num_attention_heads=1, pipeline_model_parallel_size=num_stages,
        pipeline_dtype=torch.float32, **{names.get(name, name): value for name, value in given.items()},
    )  # fmt: skip
    assert tuple(get_num_layers_to_build(config, None, rank) for rank in range(num_stages)) == layers


def test_the_stage_of_a_process() -> None:
    """Megatron numbers ranks by tensor-parallel rank, data-parallel rank and stage, or with the last two exchanged."""
    sizes = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "world_size": 8}
    for mapped, stages in ((False, [0, 0, 0, 0, 1, 1, 1, 1]), (True, [0, 0, 1, 1, 0, 0, 1, 1])):
        args = [SimpleNamespace(**sizes, rank=rank, use_tp_pp_dp_mapping=mapped) for rank in range(8)]
        assert [stage_of(one) for one in args] == stages
        setup = setup_of_cost(COST, 2, Cluster(2, 1024))
        devices = devices_of(replace(setup, mesh=replace(setup.mesh, tensor_parallel=2, stages_before_ranks=mapped)))
        assert all(one.rank in devices[hdp_rank_of(one), stage_of(one)] for one in args)
