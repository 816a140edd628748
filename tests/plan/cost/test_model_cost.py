"""Cost files as values: JSON round trip, refused values, and sums over stages."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.model_cost import ModelCost, expert_share, flops_cost, flops_stage_cost, model_flops
from bytescale_ext.plan.cost.model_shape import (
    LLAMA_7B,
    LatentShape,
    ModelShape,
    attention_flops_per_square,
    expansion_flops,
    key_value_bytes,
    linear_flops_per_token,
)
from bytescale_ext.plan.cost.nodes import Nodes
from bytescale_ext.plan.step.micro_batch import Shard
from bytescale_ext.plan.step.sizes import Cluster

LAYER = CostModel(a=1e-10, b=2e-6, c=1e-7, g=3e-4)
TINY = ModelShape(num_layers=2, hidden=8, num_heads=4, num_kv_heads=2, head_dim=3, ffn_hidden=10, gated=True, vocab=20)
COST = ModelCost(LLAMA_7B, "a device", "bfloat16", 2, "made up", LAYER, LAYER.scaled(2.5), 1e-6, 2e-6, 9e4, 8e3)


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the JSON of a cost file with one entry changed."""
    whole = json.loads(json.dumps(COST.to_json()))
    *folders, name = path.split(".")
    place = whole
    for folder in folders:
        place = place[folder]
    place[name] = value
    return whole


def test_a_cost_file_comes_back_as_it_was() -> None:
    assert ModelCost.from_json(json.loads(json.dumps(COST.to_json()))) == COST


@pytest.mark.parametrize("path", ["forward.a", "backward.g", "head_forward", "layer_bytes", "slowdown"])
@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan"), "3", None])
def test_constants_are_numbers_from_0_on(path: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"the cost file's {path} is {value}"):
        ModelCost.from_json(changed(path, value))


@pytest.mark.parametrize("path", ["forward.a", "forward.b", "backward.a", "backward.b"])
def test_attention_and_linear_work_cost_time(path: str) -> None:
    with pytest.raises(ValueError, match=f"{path} is 0"):
        ModelCost.from_json(changed(path, 0.0))
    free = changed(path[:-1] + "c", 0)
    assert ModelCost.from_json(free).to_json() == free


@pytest.mark.parametrize("path", ["shape", "forward", "device", "head_backward"])
def test_what_is_missing_or_unknown_is_named(path: str) -> None:
    without = changed(path, None)
    del without[path]
    with pytest.raises(ValueError, match=f"not a cost file .*{path}.*bytescale profile"):
        ModelCost.from_json(without)
    with pytest.raises(ValueError, match=r"not a cost file .*colour"):
        ModelCost.from_json(changed("forward.colour", 3))
    with pytest.raises(ValueError, match=r"not a cost file .*nodes"):
        ModelCost.from_json(changed("forward.nodes", {"ranks": 4}))


def test_links_between_nodes_are_slower_where_the_file_says_so() -> None:
    slow, cluster = replace(COST, slowdown=3.0), Cluster(16, 64, 4)
    assert COST.nodes(cluster) is None
    assert slow.nodes(Cluster(16, 64)) is None
    assert slow.nodes(cluster) == Nodes(4, 3.0)
    assert slow.nodes(replace(cluster, hierarchical_rings="off")) == Nodes(4, 3.0, hierarchical=False)
    assert ModelCost.from_json(slow.to_json()) == slow


def test_stages_add_up_to_the_model() -> None:
    parts = [COST.stage(10), COST.stage(10), COST.stage(12, has_head=True)]
    for length in (1, 100, 50_000):
        total = sum(part.both.sequence_cost(length, 2) for part in parts)
        assert total == pytest.approx(COST.whole().both.sequence_cost(length, 2))
    keys = key_value_bytes(COST.shape, COST.tensor_parallel, 4 if COST.dtype == "float32" else 2)
    assert COST.stage(1, link=1e9) == StageCost(COST.forward, COST.backward, key_read=keys / 1e9)
    assert COST.stage(2, has_head=True).forward.b == pytest.approx(2 * LAYER.b + 1e-6)


def test_flops_of_one_stage_are_those_of_the_model() -> None:
    stage, whole = flops_stage_cost(LLAMA_7B, 32), flops_cost(LLAMA_7B)
    assert (stage.both.a, stage.both.b) == pytest.approx((whole.a, whole.b))
    assert stage.backward.a == pytest.approx(2 * stage.forward.a)


def test_flops_of_latents_are_those_of_their_expansions() -> None:
    """DeepSeek-V2-Lite's attention expands a token with 2 x 512 x 16 x (128 + 128) FLOPs. MFU counts them once."""
    latent = LatentShape(query_rank=0, key_rank=512, position_dim=64, value_dim=128)
    shape = ModelShape(27, 2048, 16, 16, 192, 10944, True, 102400, latent=latent)
    one = 2 * 512 * 16 * 256
    assert (expansion_flops(shape), expansion_flops(shape, 8)) == (one, one)
    assert expansion_flops(shape, 16) == expansion_flops(LLAMA_7B) == 0  # keys and values travel
    stage = flops_stage_cost(shape, 9)
    assert (stage.forward.e, stage.backward.e) == (9 * one, 9 * 3 * one)
    plain = flops_stage_cost(replace(shape, latent=replace(latent, is_plain=False)), 9)
    assert (plain.forward.e, plain.backward.e) == (0, 0)
    assert stage.backward.b - plain.backward.b == pytest.approx(9 * one)
    assert replace(stage.forward, e=0.0) == plain.forward
    assert flops_stage_cost(shape, 9, tensor_parallel=16) == plain
    assert model_flops(shape, [1000, 50]) == model_flops(
        replace(shape, latent=replace(latent, is_plain=False)), [1000, 50]
    )
    # A hop costs a token about as much as attention of 400 more queries, as the architecture page says.
    assert one / (2 * 16 * (192 + 128)) == pytest.approx(400, rel=0.03)
    rates = cost_of_rates(shape, 1e14, 1e14, 1e14, tensor_parallel=2)
    assert (rates.forward.e, rates.backward.e) == pytest.approx((one / 2 / 1e14, 3 * one / 2 / 1e14))
    assert "e" not in rates.to_json()["forward"]  # type: ignore[operator]


@pytest.mark.parametrize("num_layers", [16, 7, 1])
@pytest.mark.parametrize("has_head", [True, False])
def test_flops_of_a_stage_have_its_layers_and_the_head(num_layers: int, has_head: bool) -> None:
    stage = flops_stage_cost(LLAMA_7B, num_layers, has_head)
    assert stage.forward.a == pytest.approx(num_layers * 2 * 32 * 128)
    head = 2 * LLAMA_7B.hidden * LLAMA_7B.vocab
    layer = (linear_flops_per_token(LLAMA_7B) - head) / 32
    assert stage.forward.b == pytest.approx(num_layers * layer + has_head * head)


def test_stages_share_out_layers_of_experts_too() -> None:
    shape = ModelShape(8, 64, 4, 4, 16, 256, True, 1000, num_expert_layers=4, expert_ffn_hidden=512, num_experts=8)
    half = replace(shape, num_layers=4, num_expert_layers=2)
    assert flops_stage_cost(shape, 4).forward.b == pytest.approx(linear_flops_per_token(half))


def test_the_share_of_routed_experts_in_a_stage() -> None:
    shape = replace(TINY, num_expert_layers=2, expert_ffn_hidden=70, shared_ffn_hidden=30, num_experts=4)
    routed = 2 * 3 * 8 * 40  # FLOPs of a token in a layer
    without = replace(shape, expert_ffn_hidden=30)
    for layers, has_head in ((2, True), (1, False), (1, True)):
        share = expert_share(shape, layers, has_head)
        part = replace(without.part(layers), vocab=20 if has_head else 0)
        assert share == pytest.approx(layers * routed / (layers * routed + linear_flops_per_token(part)))
    assert expert_share(TINY, 2) == expert_share(without, 2) == 0.0
    latent = replace(shape, expert_latent=5)
    assert expert_share(latent, 2) == pytest.approx(2 * 2 * 3 * 5 * 40 / linear_flops_per_token(latent))


def test_model_flops_are_three_forwards_of_each_document() -> None:
    one = 3 * (attention_flops_per_square(TINY) * 100 + linear_flops_per_token(TINY) * 10)
    assert model_flops(TINY, [10]) == one
    assert model_flops(TINY, [10, 10]) == 2 * one
    assert model_flops(TINY, [20]) > 2 * one
    assert model_flops(TINY, []) == 0


def test_members_of_a_ring_together_do_the_work_of_the_sequence() -> None:
    cost = flops_cost(TINY)
    shards = [Shard(0, ((0, 2), (5, 6)), (0, 1)), Shard(0, ((2, 4), (4, 5)), (0, 1))]
    assert sum(cost.shard_cost(shard, 6) for shard in shards) == pytest.approx(model_flops(TINY, [6]))


def test_windows_are_of_the_model_and_not_of_its_cost_file() -> None:
    shape = replace(TINY, num_window_layers=1, window_tokens=16)
    assert (shape.window, TINY.window) == (16, None)
    cost = flops_cost(shape)
    assert (cost.a, cost.b) == (flops_cost(TINY).a, flops_cost(TINY).b)
    assert (cost.window, cost.window_share) == (17, 0.5)
    assert flops_stage_cost(shape, 1).both.window_share == 0.5
    assert model_flops(shape, [100]) < model_flops(TINY, [100])
    assert model_flops(shape, [17]) == model_flops(TINY, [17])
    measured = replace(COST, shape=shape)
    assert "window" not in json.dumps(measured.to_json())
    assert (measured.stage(1).forward.window, measured.whole().backward.window_share) == (17, 0.5)
    with pytest.raises(ValueError, match="num_window_layers is not an entry"):
        ModelCost.from_json({**COST.to_json(), "shape": {**COST.to_json()["shape"], "num_window_layers": 1}})
