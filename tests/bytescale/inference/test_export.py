"""Heads in a checkpoint of tensor-parallel ranks are exported whole, and divided again for ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.bytescale.inference.export import LayerArguments, export_heads, heads_in, layer_settings
from megatron.bytescale.inference.heads_folder import read_config, read_tensors
from tests.e2e.drafts import LATENT, LAYOUTS, ONE, WINDOWS, heads_of, trunk
from tests.e2e.oracle import shard_of
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def held(rank: int, world: int, load: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return the heads that this rank reads from a folder."""
    from megatron.bytescale.inference.load import open_decoder

    decoder, _ = open_decoder(load, folder, on_cpu=True)
    return {name: one.detach().clone() for name, one in decoder.heads.named_parameters()}


def test_heads_of_any_layout_are_whole(tmp_path: Path) -> None:
    ranks, flags = next(value for name, value in LAYOUTS.items() if "tensor" in name)
    folders = []
    for number, save in enumerate((heads_of(1, *ONE).save, heads_of(ranks, *flags).save)):
        folders.append(tmp_path / f"heads{number}")
        settings, num_parameters = export_heads(save, folders[-1])
        assert (settings.kind, settings.num_heads, settings.num_layers) == ("clover", 3, 1)
        found_settings, shapes = read_config(folders[-1])
        assert found_settings == settings
        tensors, stored = read_tensors(folders[-1], shapes), heads_in(save / "iter_0000002")
        assert tensors.keys() == stored.keys()
        assert all(torch.equal(tensors[name], stored[name]) for name in stored)
        assert num_parameters == sum(one.numel() for one in stored.values())
    first, second = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert first["tensors"] == second["tensors"]
    assert first["trunk"] == second["trunk"]
    assert first["model"]["activation"] == "silu"
    assert first["model"]["dtype"] == "float32"
    whole = read_tensors(folders[0], first["trunk"])
    for rank, part in enumerate(run_ranks(held, 2, trunk(), folders[0])):
        assert part.keys() == whole.keys()
        assert part["layer0.mlp.linear_fc1.weight"].shape != whole["layer0.mlp.linear_fc1.weight"].shape
        assert all(torch.equal(part[name], shard_of(whole[name], name, part[name], rank, 2)) for name in whole)


@pytest.mark.full
@pytest.mark.parametrize("model", [LATENT, WINDOWS], ids=["latent attention", "windows and sinks"])
def test_heads_with_other_attention_are_whole(model: list[str], tmp_path: Path) -> None:
    save, folder = heads_of(1, *ONE, model=model).save, tmp_path / "heads"
    export_heads(save, folder)
    whole, stored = read_tensors(folder, read_config(folder)[1]), heads_in(save / "iter_0000002")
    assert whole.keys() == stored.keys()
    assert all(torch.equal(whole[name], stored[name]) for name in stored)
    for rank, part in enumerate(run_ranks(held, 2, trunk(model), folder)):
        assert part.keys() == whole.keys()
        assert all(torch.equal(part[name], shard_of(whole[name], name, part[name], rank, 2)) for name in whole)


def test_a_checkpoint_without_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this checkpoint has no draft heads"):
        export_heads(trunk(), tmp_path / "heads")
    with pytest.raises(ValueError, match=r"--load .*: there is no checkpoint"):
        export_heads(tmp_path, tmp_path / "heads")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("swiglu", "squared", "activation"), [(True, False, "silu"), (False, True, "relu2"), (False, False, "gelu")]
)
def test_what_layers_compute_with(swiglu: bool, squared: bool, activation: str) -> None:
    layers = LayerArguments(
        swiglu=swiglu, squared_relu=squared, params_dtype=torch.bfloat16, layernorm_epsilon=1e-6, rotary_base=10_000,
        rotary_percent=0.5, rotary_interleaved=False, max_position_embeddings=4096, num_layers=3,
        softmax_type="learnable", window_size=(128, 0), window_attn_skip_freq=[1, 0, 1],
    )  # fmt: skip
    found = layer_settings(layers)
    assert found.pop("activation") == activation
    assert found == {
        "dtype": "bfloat16",
        "norm_epsilon": 1e-6,
        "rotary_base": 10_000,
        "rotary_percent": 0.5,
        "rotary_interleaved": False,
        "max_position_embeddings": 4096,
        "softmax_type": "learnable",
        "window": 128,
    }
    assert json.loads(json.dumps(found)) == found
    assert layer_settings(replace(layers, num_layers=2))["window"] is None
    assert layer_settings(replace(layers, window_size=None))["window"] is None
