"""Draft heads of a sharded checkpoint of Megatron's, of any layout, written to a folder of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from bytescale_ext.config.drafts import DraftConfig
from megatron.bytescale.inference.heads_folder import norms_apart, safetensors_torch, write_folder
from megatron.bytescale.inference.load import arguments_of, checkpoint_at, heads_of, shape_of

PREFIX = "draft_heads."


def export_heads(source: Path, folder: Path) -> tuple[DraftConfig, int]:
    """Write the heads of the last checkpoint in ``source`` to a new folder; return what they are, and their parameters.

    Raises:
        ValueError: there is no checkpoint with heads, the folder exists, or safetensors is not installed.
    """
    safetensors_torch()
    checkpoint = checkpoint_at("--load", source)
    args = arguments_of(checkpoint)
    settings = heads_of(args, checkpoint)
    if settings is None:
        raise ValueError(f"--load {source}: this checkpoint has no draft heads")
    tensors = heads_in(checkpoint)
    write_folder(folder, settings, shape_of(args), layer_settings(args), tensors)
    return settings, sum(tensor.numel() for tensor in tensors.values())


def layer_settings(args: Any) -> dict[str, object]:
    """Return what the layers compute with beside the shapes: norms, activation and rotary positions."""
    activation = "silu" if args.swiglu else "relu2" if args.squared_relu else "gelu"
    return {
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "norm_epsilon": args.layernorm_epsilon,
        "activation": activation,
        "rotary_base": args.rotary_base,
        "rotary_percent": args.rotary_percent,
        "rotary_interleaved": args.rotary_interleaved,
        "max_position_embeddings": args.max_position_embeddings,
    }


def heads_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the heads of a checkpoint, whole and of any shape, by Megatron's names in the heads."""
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if name.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    load(state, checkpoint_id=str(checkpoint), no_dist=True)
    return {norms_apart(name.removeprefix(PREFIX)): tensor for name, tensor in state.items()}
