"""A model for decoding from a sharded checkpoint of Megatron's, of any layout, on this process's device alone."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bytescale_ext.config.drafts import DraftConfig
from megatron.bytescale import cpu
from megatron.bytescale.checkpoints import names_in, to_load
from megatron.bytescale.features.drafts import config_of
from megatron.bytescale.inference.engine import Decoder

ONE_PROCESS = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1, "expert_model_parallel_size": 1, "sequence_parallel": False, "world_size": 1, "rank": 0,
    "overlap_p2p_comm": False, "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None,
    "gradient_accumulation_fusion": False, "pipeline_model_parallel_layout": None,
}  # fmt: skip
"""Arguments of the training run that decoding does not share."""
CANNOT = {
    "num_experts": "mixtures of experts", "window_size": "sliding windows",
    "multi_latent_attention": "latent attention", "mtp_num_layers": "layers for several tokens (MTP)",
    "ngram_layers": "n-gram memory",
}  # fmt: skip


def checkpoint_at(flag: str, folder: Path) -> Path:
    """Return the last checkpoint in a folder. Raises ValueError where there is none that can be read."""
    found = to_load(folder)
    if found is None:
        raise ValueError(f"{flag} {folder}: there is no checkpoint")
    if not (found / ".metadata").is_file():
        raise ValueError(f"{flag} {found}: only checkpoints of --ckpt-format torch_dist can be read")
    return found


def arguments_of(checkpoint: Path) -> Any:
    """Return the training arguments that a checkpoint holds. Raises ValueError where they are missing."""
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    args = load_common_state_dict(checkpoint).get("args")
    if args is None:
        raise ValueError(f"{checkpoint}: it holds no training arguments")
    return args


def heads_of(args: Any, checkpoint: Path) -> DraftConfig | None:
    """Return which heads a checkpoint has, None where it has none. Raises ValueError where they are missing."""
    if getattr(args, "draft_heads", None) is None:
        return None
    config = config_of(args)
    if not any(name.startswith("draft_heads.") for name in names_in(checkpoint)):
        raise ValueError(f"{checkpoint}: the tensors of its draft heads are missing")
    return config


def shape_of(args: Any) -> dict[str, object]:
    """Return what must agree between a model and heads trained on it."""
    names = (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
        "padded_vocab_size", "tokenizer_type", "normalization", "position_embedding_type", "swiglu",
    )  # fmt: skip
    return {name: getattr(args, name) for name in names}


def open_decoder(load: Path, draft: Path | None, on_cpu: bool) -> tuple[Decoder, Any]:
    """Return the decoder of a checkpoint, and the training arguments in it.

    Args:
        load: folder of checkpoints with the model, and perhaps heads.
        draft: folder of checkpoints with the heads; None: those of ``load``, where it has any.
        on_cpu: decode on CPU although there is a GPU.

    Raises:
        ValueError: a checkpoint cannot be read, is of a model that cannot decode here, or has heads of another model.
    """
    checkpoint = checkpoint_at("--load", load)
    drafts = checkpoint if draft is None else checkpoint_at("--draft", draft)
    stand_ins = cpu.install_if_wanted(["--cpu"] if on_cpu else [])  # before Megatron is imported
    args, draft_args = arguments_of(checkpoint), arguments_of(drafts)
    for name, what in CANNOT.items():
        if getattr(args, name, None):
            raise ValueError(f"--load {load}: models with {what} cannot decode here")
    heads = heads_of(draft_args, drafts)
    if draft is not None and heads is None:
        raise ValueError(f"--draft {draft}: this checkpoint has no draft heads")
    mine, theirs = shape_of(args), shape_of(draft_args)
    for name, value in mine.items():
        if value != theirs[name]:
            raise ValueError(f"--draft {draft}: heads of another model: its {name} is {theirs[name]}, not {value}")
    model = build_model(args, heads, stand_ins is not None)
    read_weights(model, checkpoint, drafts)
    return Decoder(model, getattr(model, "draft_heads", None), args.max_position_embeddings), args


def build_model(args: Any, heads: DraftConfig | None, on_cpu: bool) -> Any:
    """Return Megatron's model of training arguments, with heads, without weights. Call it once in a process."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    from bytescale_ext.attention.kernels.table import choose_kernel
    from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import use_document_positions
    from megatron.bytescale.core.models.gpt.draft_heads import DraftHeads
    from megatron.bytescale.core.models.gpt.gpt_layer_specs import document_layer_spec, with_core_attention
    from megatron.bytescale.core.models.gpt.trunk import HEADS
    from megatron.bytescale.core.transformer.spec_utils import layers_of
    from megatron.bytescale.inference.cache import CachedAttention

    device = torch.device("cpu" if on_cpu else "cuda")
    vars(args).update(ONE_PROCESS, use_cpu_initialization=on_cpu)
    if not torch.distributed.is_initialized():
        file = tempfile.NamedTemporaryFile(delete=False).name
        backend = "gloo" if on_cpu else "nccl"
        torch.distributed.init_process_group(backend, init_method=f"file://{file}", rank=0, world_size=1)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = gpt_config_from_args(args)
    config.rope_scaling_factor = args.rope_scaling_factor  # which Megatron's function leaves out
    head_dim = config.transformer.kv_channels
    runtime = SimpleNamespace(comm=None, kernel=choose_kernel(device, args.params_dtype, head_dim)[0])
    layers = document_layer_spec(runtime)
    attention = partial(CachedAttention, runtime=runtime)
    config.transformer_layer_spec = lambda config, vp_stage: with_core_attention(layers(config, vp_stage), attention)
    model: Any = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    if heads is not None:
        layer = layers_of(model.transformer_layer_spec)[0]
        model.add_module(HEADS, DraftHeads(model.config, heads, layer))
    use_document_positions([model])
    return model.to(device=device, dtype=args.params_dtype).eval()


def read_weights(model: Any, checkpoint: Path, drafts: Path) -> None:
    """Read the weights of a model, and those of its heads. Raises ValueError for tensors that a checkpoint lacks."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from megatron.bytescale.core.models.gpt.trunk import HEADS

    metadata: dict[str, Any] = {"dp_cp_group": torch.distributed.group.WORLD}
    wanted = model.sharded_state_dict(metadata=metadata)
    of_heads = {name: wanted.pop(name) for name in list(wanted) if name.startswith(f"{HEADS}.")}
    state: dict[str, Any] = {}
    for part, folder in ((wanted, checkpoint), (of_heads, drafts)):
        stored = set(names_in(folder))
        tensors = (one for one in part.values() if isinstance(one, ShardedTensor | ShardedTensorFactory))
        if missing := sorted({one.key for one in tensors} - stored):
            raise ValueError(f"{folder}: tensors are missing, such as {missing[0]}")
        found = dist_checkpointing.load(part, str(folder)) if part else {}
        state.update({name: found[name] for name in part})
    model.load_state_dict(state)
