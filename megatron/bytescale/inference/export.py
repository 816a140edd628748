"""Exports draft heads from a sharded Megatron checkpoint with any layout to a separate folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from bytescale_ext.config.drafts import DraftConfig
from bytescale_ext.errors import one_line
from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.checkpoints import read_metadata
from megatron.bytescale.inference.heads_folder import norms_apart, safetensors_torch, write_folder
from megatron.bytescale.inference.load import TrunkArguments, checkpoint_arguments, checkpoint_at, heads_of

PREFIX = "draft_heads."


def export_heads(source: Path, folder: Path) -> tuple[DraftConfig, int]:
    """Export the heads of the last checkpoint in ``source``; return their settings and number of parameters.

    Raises:
        ValueError: no checkpoint has heads, the folder exists, or safetensors is not installed.
    """
    safetensors_torch()
    checkpoint = checkpoint_at("--load", source)
    args = checkpoint_arguments(checkpoint)
    settings = heads_of(args, checkpoint)
    if settings is None:
        raise ValueError(f"--load {source}: this checkpoint has no draft heads")
    tensors = heads_in(checkpoint)
    trunk, layers = options_of(args, TrunkArguments), options_of(args, LayerArguments)
    write_folder(folder, settings, trunk.shape(), layer_settings(layers), tensors)
    return settings, sum(tensor.numel() for tensor in tensors.values())


@dataclass(frozen=True)
class LayerArguments:
    """Megatron's layer arguments, under the same names, that a heads folder stores in addition to shapes."""

    params_dtype: torch.dtype
    swiglu: bool
    squared_relu: bool
    layernorm_epsilon: float
    rotary_base: float
    rotary_percent: float
    rotary_interleaved: bool
    max_position_embeddings: int
    num_layers: int
    softmax_type: str = "vanilla"
    window_size: tuple[int, int] | None = None
    window_attn_skip_freq: int | list[int] | None = None


def layer_settings(layers: LayerArguments) -> dict[str, object]:
    """Return the settings of the layers' computation, without shapes: norms, activation, rotary positions, attention.

    The layers below the heads have the window of the model's last layer.
    """
    from megatron.core.transformer.utils import is_layer_window_attention

    activation = "silu" if layers.swiglu else "relu2" if layers.squared_relu else "gelu"
    has_window = is_layer_window_attention(layers.window_size, layers.window_attn_skip_freq, layers.num_layers)
    return {
        "dtype": str(layers.params_dtype).removeprefix("torch."),
        "norm_epsilon": layers.layernorm_epsilon,
        "activation": activation,
        "rotary_base": layers.rotary_base,
        "rotary_percent": layers.rotary_percent,
        "rotary_interleaved": layers.rotary_interleaved,
        "max_position_embeddings": layers.max_position_embeddings,
        "softmax_type": layers.softmax_type,
        "window": layers.window_size[0] if has_window and layers.window_size is not None else None,
    }


def heads_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a checkpoint's heads, of any shape, under Megatron's names within the heads."""
    metadata = read_metadata(checkpoint / ".metadata").state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if name.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    try:
        load(state, checkpoint_id=str(checkpoint), no_dist=True)
    except Exception as error:  # torch raises many types for damaged files
        raise ValueError(f"{checkpoint} cannot be read ({one_line(error, 200)})") from None
    return {norms_apart(name.removeprefix(PREFIX)): tensor for name, tensor in state.items()}
