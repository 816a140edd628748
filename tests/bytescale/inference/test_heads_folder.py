"""Folder of heads: bitwise round trip in the layout of other servers, and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale_ext.config.drafts import DraftConfig
from megatron.bytescale.inference import heads_folder
from megatron.bytescale.inference.heads_folder import (
    CONFIG,
    TENSORS,
    is_folder_of_heads,
    read_config,
    read_tensors,
    to_plain,
    trunk_hash,
    write_folder,
)

HIDDEN, HEADS, GROUPS, DIM, FFN = 8, 4, 2, 3, 5
TRUNK = {"hidden_size": HIDDEN, "num_query_groups": GROUPS, "kv_channels": DIM, "swiglu": True, "vocab_size": 11}
SETTINGS = DraftConfig("clover", 3, 2, 0.7)


def tensors(swiglu: bool = True) -> dict[str, torch.Tensor]:
    """Return heads with Megatron's names and with biases, as in a checkpoint."""
    torch.manual_seed(0)
    rows = {"qkv": (HEADS + 2 * GROUPS) * DIM, "proj": HIDDEN, "fc1": FFN * (1 + swiglu), "fc2": HIDDEN}
    found = {name: torch.randn(HIDDEN, HIDDEN) for name in ("first.weight", "start.norm.weight", "blocks.0.weight")}
    for layer in ("layer0", "layer1"):
        for module, size in rows.items():
            where = "mlp" if module.startswith("fc") else "self_attention"
            found[f"{layer}.{where}.linear_{module}.weight"] = torch.randn(size, 7)
            found[f"{layer}.{where}.linear_{module}.bias"] = torch.randn(size)
        for norm in ("input_layernorm", "pre_mlp_layernorm", "self_attention.q_layernorm"):
            found[f"{layer}.{norm}.weight"] = torch.randn(HIDDEN)
    return found


def written(folder: Path) -> Path:
    write_folder(folder / "heads", SETTINGS, TRUNK, {"norm_epsilon": 1e-5}, tensors())
    return folder / "heads"


def test_products_are_split_as_servers_know_them() -> None:
    mine = tensors()
    plain = to_plain(mine, TRUNK)
    qkv = mine["layer1.self_attention.linear_qkv.weight"].view(GROUPS, HEADS // GROUPS + 2, DIM, 7)
    for head in range(HEADS):
        group, place = divmod(head, HEADS // GROUPS)
        rows = plain["layers.1.self_attn.q_proj.weight"][head * DIM : (head + 1) * DIM]
        assert torch.equal(rows, qkv[group, place])
    for group in range(GROUPS):
        for name, place in (("k_proj", -2), ("v_proj", -1)):
            rows = plain[f"layers.1.self_attn.{name}.weight"][group * DIM : (group + 1) * DIM]
            assert torch.equal(rows, qkv[group, place])
    assert torch.equal(plain["layers.0.mlp.gate_proj.bias"], mine["layer0.mlp.linear_fc1.bias"][:FFN])
    assert torch.equal(plain["layers.0.mlp.up_proj.weight"], mine["layer0.mlp.linear_fc1.weight"][FFN:])
    assert "layers.0.post_attention_layernorm.weight" in plain
    assert "layers.0.self_attn.q_norm.weight" in plain
    assert not any("linear_" in name or name.startswith("layer0") for name in plain)


def test_a_folder_is_read_back(tmp_path: Path) -> None:
    folder = written(tmp_path)
    assert is_folder_of_heads(folder)
    assert not is_folder_of_heads(tmp_path)
    settings, trunk = read_config(folder)
    assert (settings, trunk) == (SETTINGS, TRUNK)
    found, mine = read_tensors(folder, trunk), tensors()
    assert found.keys() == mine.keys()
    assert all(torch.equal(found[name], mine[name]) for name in mine)
    config = json.loads((folder / CONFIG).read_text())
    assert config["tensors"]["layers.1.self_attn.k_proj.weight"] == [GROUPS * DIM, 7]
    assert config["trunk_hash"] == trunk_hash(dict(reversed(TRUNK.items())))
    assert config["trunk_hash"] != trunk_hash({**TRUNK, "vocab_size": 12})
    assert any("cosine" in line for line in config["computation"])
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]
    with pytest.raises(ValueError, match=r"--output .*heads: it exists already"):
        written(tmp_path)


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **values}))


BAD = {
    "other format": (lambda folder: change(folder, format="eagle"), "its format is 'eagle', not 'bytescale draft"),
    "edited shapes": (lambda folder: change(folder, trunk={}), "its trunk_hash does not match its trunk"),
    "no heads": (lambda folder: change(folder, heads={"kind": "clover"}), "missing 3 required positional"),
    "bad heads": (lambda folder: change(folder, heads={"kind": "x", "num_heads": 1, "num_layers": 0, "decay": 1}), "x"),
    "not JSON": (lambda folder: (folder / CONFIG).write_text("{"), "config.json: Expecting property name"),
    "a list": (lambda folder: (folder / CONFIG).write_text("[]"), "config.json: it is not a JSON object"),
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), "config.json: No such file"),
    "no trunk": (
        lambda folder: (folder / CONFIG).write_text(json.dumps({"format": heads_folder.FORMAT})),
        "is missing",
    ),
    "no tensors": (lambda folder: (folder / TENSORS).unlink(), "model.safetensors: No such file"),
    "half written": (lambda folder: (folder / TENSORS).write_bytes(b"12345678"), "model.safetensors: "),
    "a tensor less": (lambda folder: change(folder, tensors={"layers.2.x": [1]}), "missing, such as layers.2.x"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    spoil, message = BAD[name]
    folder = written(tmp_path)
    spoil(folder)
    assert is_folder_of_heads(folder)
    with pytest.raises(ValueError, match=message) as caught:
        read_tensors(folder, read_config(folder)[1])
    assert "--draft" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ValueError, match=r"need safetensors: pip install 'bytescale-megatron\[heads\]'"):
        written(tmp_path)
    assert not list(tmp_path.iterdir())
