"""Cost files: shipped files, reading and writing, and errors that name file and entry in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.measure.cost_file import SHIPPED, check_same_model, read_cost, shipped, write_cost
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import LLAMA_7B, LatentShape, ModelShape

COST = ModelCost(
    shape=ModelShape(2, 8, 4, 2, 3, 10, True, 20),
    device="a device",
    dtype="bfloat16",
    tensor_parallel=2,
    source="a test",
    forward=CostModel(1e-9, 2e-6, 3e-7, 4e-5),
    backward=CostModel(2.5e-9, 4e-6, 6e-7, 5e-5),
    head_forward=1e-6,
    head_backward=2e-6,
    layer_bytes=136.0,
    recompute_bytes=16.0,
)


def broken(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    """Return the message for a valid file after ``change``, which changes its content or returns another content."""
    value = COST.to_json()
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(change(value) or value))
    with pytest.raises(ValueError, match="cost") as caught:
        read_cost(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_written_and_read_back(tmp_path: Path) -> None:
    write_cost(tmp_path / "cost.json", COST)
    assert read_cost(tmp_path / "cost.json") == COST
    assert read_cost(str(tmp_path / "cost.json")) == COST


def test_latents_are_written_and_read_back(tmp_path: Path) -> None:
    latent = replace(COST, shape=replace(COST.shape, latent=LatentShape(0, 512, 64, 128, has_norms=True)))
    write_cost(tmp_path / "cost.json", latent)
    assert read_cost(tmp_path / "cost.json") == latent
    assert check_same_model(latent, latent.shape, 2, "bfloat16", "cost.json") == latent
    with pytest.raises(ValueError, match="latent is None there"):
        check_same_model(COST, latent.shape, 2, "bfloat16", "cost.json")

    def broken_latent(**entries: object) -> str:
        value = {**latent.to_json()["shape"]["latent"], **entries}  # type: ignore[index]
        return broken(tmp_path, lambda whole: whole["shape"].update(latent=value))

    assert "shape.latent.key_rank is 0" in broken_latent(key_rank=0)
    assert "shape.latent.is_plain is 1" in broken_latent(is_plain=1)
    assert "shape.latent has an unknown entry rank" in broken_latent(rank=1)
    assert "shape.latent holds a int" in broken(tmp_path, lambda whole: whole["shape"].update(latent=3))


@pytest.mark.parametrize("name", [path.stem for path in SHIPPED.glob("*.json")])
def test_every_shipped_file_is_sound_and_names_its_source(name: str) -> None:
    cost = shipped(name)
    assert len(cost.source) > 40
    assert cost.layer_bytes > cost.recompute_bytes > 0
    assert cost.forward.c > 0


def test_the_shipped_7b_model_is_the_papers() -> None:
    cost = shipped("bytescale_7b")
    assert cost.shape == LLAMA_7B
    assert "ByteScale" in cost.source
    assert "Fig. 18a" in cost.source
    assert "fit" in cost.source
    # Fig. 6a: linear and quadratic work are equal at about 38K tokens. Fig. 18a: attention of a pack of 2M tokens on
    # 256 ranks takes 405 ms, bound by the exchange; attention of one sequence of 312K tokens on 39 ranks takes 110 ms.
    assert 36e3 < cost.forward.b / cost.forward.a < 40e3
    assert cost.forward.c * 2 * 1024**2 * 255 / 256 == pytest.approx(0.405, rel=0.1)
    assert cost.forward.attention_cost(312 * 1024, 39) == pytest.approx(0.110, rel=0.05)
    assert cost.backward.a == pytest.approx(2.5 * cost.forward.a)
    assert cost.backward.b == pytest.approx(2 * cost.forward.b)


@pytest.mark.parametrize("content", [b"", b"{", b"a = 1", b"\xff\xfe\x00"])
def test_no_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not JSON") as caught:
        read_cost(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("entry", ["head_forward", "head_backward", "layer_bytes", "recompute_bytes"])
@pytest.mark.parametrize("number", [-1, "fast", None, float("nan"), float("inf")])
def test_bad_constants_are_named(tmp_path: Path, entry: str, number: object) -> None:
    assert f"{entry} is" in broken(tmp_path, lambda value: value.update({entry: number}))


def test_bad_sizes_and_texts_are_named(tmp_path: Path) -> None:
    assert "shape.hidden is 0" in broken(tmp_path, lambda value: value["shape"].update(hidden=0))
    assert "shape.num_heads is 2.5" in broken(tmp_path, lambda value: value["shape"].update(num_heads=2.5))
    assert 'shape.gated is "yes"' in broken(tmp_path, lambda value: value["shape"].update(gated="yes"))
    assert "tensor_parallel is true" in broken(tmp_path, lambda value: value.update(tensor_parallel=True))
    assert "dtype is 16" in broken(tmp_path, lambda value: value.update(dtype=16))


def test_the_same_model_may_have_other_layers() -> None:
    deeper = replace(COST.shape, num_layers=80)
    cost = check_same_model(COST, deeper, 2, "bfloat16", "cost.json")
    assert cost == replace(COST, shape=deeper)
    assert cost.whole().forward.a == pytest.approx(80 * COST.forward.a)


def test_the_head_costs_as_much_as_its_vocabulary() -> None:
    """Megatron pads the vocabulary to a multiple that depends on the number of tensor-parallel ranks."""
    wider = replace(COST.shape, vocab=3 * COST.shape.vocab)
    cost = check_same_model(COST, wider, 2, "bfloat16", "cost.json")
    assert cost.head_forward == pytest.approx(3 * COST.head_forward)
    assert cost.head_backward == pytest.approx(3 * COST.head_backward)
    assert replace(cost, shape=COST.shape, head_forward=COST.head_forward, head_backward=COST.head_backward) == COST


@pytest.mark.parametrize("field", ["hidden", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden", "gated"])
def test_another_model_is_refused_by_the_field(field: str) -> None:
    theirs = getattr(COST.shape, field)
    other = replace(COST.shape, **{field: not theirs if field == "gated" else theirs + 1})
    with pytest.raises(ValueError, match=f"cost.json is for another model: {field} is {theirs} there and") as caught:
        check_same_model(COST, other, 2, "bfloat16", "cost.json")
    assert "bytescale profile" in str(caught.value)


def test_costs_of_layers_with_experts_are_for_such_layers() -> None:
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden": 12}
    sparse = replace(COST, shape=replace(COST.shape, num_expert_layers=2, **experts))
    deeper = replace(sparse.shape, num_layers=80, num_expert_layers=80)
    assert check_same_model(sparse, deeper, 2, "bfloat16", "cost.json").shape == deeper
    mixed = replace(deeper, num_expert_layers=40)
    with pytest.raises(ValueError, match="model: share of layers with experts is 1 there and 1/2 here; run"):
        check_same_model(sparse, mixed, 2, "bfloat16", "cost.json")
    with pytest.raises(ValueError, match="num_experts is 0 there and 4 here"):
        check_same_model(COST, deeper, 2, "bfloat16", "cost.json")
