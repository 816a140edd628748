"""Tensors come from the files that a Hugging Face folder names, and from no others."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.bytescale.convert.weights import INDEX, WHOLE, FolderWeights

Files = dict[str, dict[str, float]]
SHARDS: Files = {"a.safetensors": {"w": 1.0, "v": 2.0}, "b.safetensors": {"u": 3.0}}
WEIGHT_MAP = {"w": "a.safetensors", "v": "a.safetensors", "u": "b.safetensors"}


def write(folder: Path, files: Files, weight_map: object = None, text: str | None = None) -> Path:
    """Write files of tensors [1] with these values, and an index."""
    for name, tensors in files.items():
        save_file({key: torch.tensor([value]) for key, value in tensors.items()}, folder / name)
    if weight_map is not None or text is not None:
        (folder / INDEX).write_text(text or json.dumps({"weight_map": weight_map}))
    return folder


def values(folder: Path, *names: str) -> tuple[list[float], list[str]]:
    """Return the values of tensors, and the notes after they were read."""
    with ExitStack() as opened:
        weights = FolderWeights(folder, opened)
        return [float(weights.read(name)) for name in names], weights.notes()


def test_the_index_decides_and_an_older_shard_is_not_opened(tmp_path: Path) -> None:
    """The case of the report: a stale file has tensors of the same names."""
    folder = write(tmp_path, {**SHARDS, "0-old.safetensors": {"w": 9.0}, "z-old.safetensors": {"u": 9.0}}, WEIGHT_MAP)
    (folder / "adapter.safetensors").write_bytes(b"damaged")
    assert values(folder, "w", "v", "u") == ([1.0, 2.0, 3.0], [])


def test_the_whole_file_comes_before_an_index(tmp_path: Path) -> None:
    folder = write(tmp_path, {**SHARDS, WHOLE: {"w": 7.0}}, WEIGHT_MAP)
    assert values(folder, "w") == ([7.0], [])


def test_other_tensors_are_named(tmp_path: Path) -> None:
    files: Files = {"a.safetensors": {"w": 1.0, "v": 2.0, "u": 8.0}, "b.safetensors": {"u": 3.0}}
    read, notes = values(write(tmp_path, files, WEIGHT_MAP), "w", "u")
    assert read == [1.0, 3.0]
    assert notes == [
        "left out, because the model does not have them: v",
        f"left out, because {INDEX} names other files for them: u",
    ]


@pytest.mark.parametrize(
    ("weight_map", "text", "message"),
    [
        ({**WEIGHT_MAP, "t": "b.safetensors"}, None, f"b.safetensors: {INDEX} says that it holds t"),
        ({**WEIGHT_MAP, "t": "c.safetensors"}, None, "c.safetensors"),
        ({"w": "../a.safetensors"}, None, "'../a.safetensors' is not the name of a .safetensors file in the folder"),
        ({"w": "pytorch_model.bin"}, None, "'pytorch_model.bin' is not the name"),
        ({"w": 3}, None, "weight_map is not a table of file names"),
        (None, "{}", "no weight_map"),
        (None, "{", "Expecting property name"),
        (None, '{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}', "w stands twice"),
        (None, "[" * 100_000, "nested too deeply"),
    ],
    ids=["missing", "no file", "outside", "pickle", "types", "no map", "json", "twice", "deep"],
)
def test_contradictions_are_one_line(weight_map: object, text: str | None, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, SHARDS, weight_map, text)
    with pytest.raises(ValueError, match=r"--input") as refusal:
        values(folder, "w")
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the tensor t is missing"):
        values(write(tmp_path, {WHOLE: {"w": 7.0}}), "t")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "3 tensors of 2?[0-9]+ bytes cannot hold 1,000,000,000 layers"),
        ({"vocab_size": 10**6}, "cannot hold 1 layers and 1,000,000 tokens of 2 numbers"),
        ({"hidden_size": -8}, "hidden_size is -8"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"intermediate_size": True}, "intermediate_size is True"),
        ({"head_dim": 1.5}, "head_dim is 1.5"),
    ],
)
def test_sizes_that_the_files_cannot_hold(change: dict[str, object], reason: str, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1, "hidden_size": 2, "vocab_size": 3, "head_dim": None}
    with ExitStack() as opened:
        weights = FolderWeights(write(tmp_path, SHARDS, WEIGHT_MAP), opened)
        weights.check_sizes(config)
        with pytest.raises(ValueError, match=reason):
            weights.check_sizes({**config, **change})
