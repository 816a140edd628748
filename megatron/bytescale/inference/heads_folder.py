"""A folder of draft heads: ``model.safetensors`` and ``config.json``, for `bytescale generate` and other programs.

Tensors have the names and the layout that most inference servers know: separate queries, keys and values, and separate
gate and up projections. The configuration contains the shapes of the heads' model, a hash of them, and a description of
the computation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch

from bytescale_ext.config.drafts import DraftConfig
from bytescale_ext.convert.products import join_qkv, split_qkv
from bytescale_ext.errors import one_line
from bytescale_ext.json_input import json_settings, json_value, stored_bytes, stored_text
from bytescale_ext.new_file import write_text
from megatron.bytescale.inference.new_folder import new_folder

FORMAT = "bytescale draft heads 1"
CONFIG, TENSORS = "config.json", "model.safetensors"
LAYER = {
    "self_attention.linear_proj": "self_attn.o_proj", "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm", "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.linear_fc2": "mlp.down_proj", "input_layernorm": "input_layernorm",
}  # fmt: skip
"""Module names of a layer in Megatron -> in the folder; ``SPLIT`` has the products of several parts."""
SPLIT = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
}
FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.", "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}  # fmt: skip
"""Prefixes of norms that TransformerEngine's products include, in the checkpoints of any layers."""
MERGE = (
    "h' = h + concat over attention heads of cos(q, k) * v, where q = query(rms_norm(h)), k = key(e), v = value(e) and "
    "cos is the cosine of the parts of one head"
)
COMPUTATION = {
    "clover": (
        "E is the weight of the model's output layer; h_t are its hidden states before its last norm.",
        "The state of token t starts as start(h_t, E[x_(t+1)]), where x_(t+1) is the model's chosen next token.",
        f"start and step: {MERGE}.",
        "The state passes through the layers (causal, with their own keys and positions 0, 1, ...), and then norm.",
        "Head 0 outputs head_norm(first(state)). Head i > 0 sets state = step(state, e), e = E[token of head i - 1], "
        "and outputs head_norm(later(concat(state, e))).",
        "The logits of head i, for the token at t + 2 + i, are E times its output.",
    ),
    "medusa": (
        "E is the weight of the model's output layer; h_t are its hidden states before its last norm.",
        "The state of token t is h_t. It passes through any layers (causal, with their own keys), and then norm.",
        "Head i outputs state + silu(blocks.i(state)). Its logits, for the token at t + 2 + i, are E times its output.",
    ),
}


def trunk_hash(trunk: Mapping[str, object]) -> str:
    """Return a hash of a model's shapes and vocabulary size."""
    return hashlib.sha256(json.dumps(dict(trunk), sort_keys=True).encode()).hexdigest()


def write_folder(
    folder: Path,
    settings: DraftConfig,
    trunk: Mapping[str, object],
    model: Mapping[str, object],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Write heads to a new folder, which gets its final name only when complete.

    Args:
        folder: path that must not exist.
        settings: settings of the heads.
        trunk: shapes and vocabulary size of the heads' model.
        model: other settings of the model that the layers' computation needs.
        tensors: tensors of the heads under Megatron's names, of any shape.

    Raises:
        ValueError: safetensors is not installed, or the folder exists.
    """
    library, _ = safetensors_torch()
    plain = {name: tensor.contiguous() for name, tensor in to_plain(tensors, trunk).items()}
    config = {
        "format": FORMAT,
        "heads": asdict(settings),
        "trunk": dict(trunk),
        "trunk_hash": trunk_hash(trunk),
        "model": dict(model),
        "computation": COMPUTATION[settings.kind],
        "tensors": {name: list(tensor.shape) for name, tensor in sorted(plain.items())},
    }
    with new_folder(folder) as part:
        library.save_file(plain, part / TENSORS, metadata={"format": "pt"})
        write_text(part / CONFIG, json.dumps(config, indent=2) + "\n")


def is_folder_of_heads(folder: Path) -> bool:
    """Return whether a folder contains heads (complete or not) and not Megatron's checkpoints."""
    return (folder / CONFIG).is_file() or (folder / TENSORS).is_file()


def read_config(folder: Path) -> tuple[DraftConfig, dict[str, object]]:
    """Return a folder's head settings and the shapes of its model. Raises ValueError for a bad configuration."""
    try:
        config = json_settings(stored_bytes(folder / CONFIG))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
        if config["format"] != FORMAT:
            raise ValueError(f"its format is {config['format']!r}, not {FORMAT!r}")
        settings, trunk = DraftConfig(**config["heads"]), dict(config["trunk"])
        if config["trunk_hash"] != trunk_hash(trunk):
            raise ValueError("its trunk_hash does not match its trunk")
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or (f"{error} is missing" if isinstance(error, KeyError) else error)
        raise ValueError(f"--draft {folder / CONFIG}: {reason}") from None
    return settings, trunk


def read_tensors(folder: Path, trunk: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Read a folder's tensors, of any shape, under Megatron's names. Raises ValueError if they cannot be read."""
    library, unreadable = safetensors_torch()
    if (folder / TENSORS).exists() and not (folder / TENSORS).is_file():  # a pipe would wait for ever
        raise ValueError(f"--draft {folder / TENSORS} is no file")
    try:
        plain = library.load_file(folder / TENSORS)
    except (OSError, unreadable) as error:
        raise ValueError(f"--draft {folder / TENSORS}: {getattr(error, 'strerror', None) or error}") from None
    listed = json_value(stored_text(folder / CONFIG)).get("tensors")
    if not isinstance(listed, dict):
        raise ValueError(f"--draft {folder / CONFIG}: tensors is missing")
    missing = [name for name in listed if name not in plain]
    if missing:
        raise ValueError(f"--draft {folder / TENSORS}: tensors are missing, such as {missing[0]}")
    try:
        return heads_to_megatron(plain, trunk)
    except (RuntimeError, AssertionError, TypeError, AttributeError) as error:  # tensors of other shapes or names
        raise ValueError(f"--draft {folder / TENSORS}: {one_line(error, 200)}") from None


def norms_apart(name: str) -> str:
    """Return a tensor's name in a Megatron model whose norms are separate modules."""
    for fused, apart in FUSED.items():
        name = name.replace(fused, apart)
    return name


def to_plain(tensors: Mapping[str, torch.Tensor], trunk: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Rename tensors of any shape to the folder's names, splitting products of several parts."""
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, module, kind = _parts(name)
        if module in SPLIT:
            of_module = zip(SPLIT[module], _split(tensor, module, trunk), strict=True)
            renamed.update({f"{prefix}{part}.{kind}": value for part, value in of_module if value is not None})
        else:
            renamed[f"{prefix}{LAYER.get(module, module)}.{kind}"] = tensor
    return renamed


def heads_to_megatron(plain: Mapping[str, torch.Tensor], trunk: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Rename tensors of any shape to Megatron's names; this is the inverse of ``to_plain``."""
    whole = {theirs: ours for ours, theirs in LAYER.items()}
    module_of = {part: module for module, parts in SPLIT.items() for part in parts}
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in plain.items():
        prefix, part, kind = _parts(name)
        prefix = re.sub(r"^layers\.", "layer", prefix)
        if part not in module_of:
            renamed[f"{prefix}{whole.get(part, part)}.{kind}"] = tensor
        elif part == SPLIT[module_of[part]][-1]:
            start = name.removesuffix(f"{part}.{kind}")
            values = [plain.get(f"{start}{part_name}.{kind}") for part_name in SPLIT[module_of[part]]]
            joined = _join([value for value in values if value is not None], module_of[part], trunk)
            renamed[f"{prefix}{module_of[part]}.{kind}"] = joined
    return renamed


def _parts(name: str) -> tuple[str, str, str]:
    """Return (layer prefix, module, kind) of a tensor name; the prefix has the folder's spelling."""
    match = re.fullmatch(r"(?:layers?\.?(\d+)\.)?(.*)\.(\w+)", name)
    assert match is not None, f"{name=}"
    return "" if match[1] is None else f"layers.{match[1]}.", match[2], match[3]


def _split(tensor: torch.Tensor, module: str, trunk: Mapping[str, object]) -> list[torch.Tensor | None]:
    """Split a product's weight or bias into parts [n, ...]; None for the gate of a model without gates."""
    if module == "mlp.linear_fc1":
        return list(tensor.chunk(2)) if trunk["swiglu"] else [None, tensor]
    return list(split_qkv(tensor, *_groups_and_width(trunk)))


def _join(parts: list[torch.Tensor], module: str, trunk: Mapping[str, object]) -> torch.Tensor:
    """Join parts [n, ...] to a product's weight or bias; this is the inverse of ``_split``."""
    if module == "mlp.linear_fc1":
        return torch.cat(parts)
    return join_qkv(parts, *_groups_and_width(trunk))


def _groups_and_width(trunk: Mapping[str, object]) -> tuple[int, int]:
    groups, width = trunk["num_query_groups"], trunk["kv_channels"]
    assert isinstance(groups, int) and isinstance(width, int), f"{trunk=}"
    return groups, width


def safetensors_torch() -> tuple[ModuleType, type[Exception]]:
    """Return safetensors' torch functions and its error type. Raises ValueError if it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise ValueError("folders of draft heads need safetensors: pip install 'bytescale-megatron[heads]'") from None
    return safetensors.torch, safetensors.SafetensorError
