"""Loads a decoder from a sharded Megatron checkpoint with any layout, on one device or split over several.

Heads are in the same checkpoint, in another checkpoint, or in a separate folder. The ranks that torchrun starts form
one tensor-parallel group.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bytescale_ext.config.drafts import DraftConfig
from bytescale_ext.errors import one_line
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import expert_parameters, num_parameters
from megatron.bytescale import cpu
from megatron.bytescale.arguments.model_shape import model_shape
from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.arguments.values import MOST
from megatron.bytescale.checkpoints import (
    arguments_in,
    check_classes,
    elements_in,
    names_in,
    one_line_if_damaged,
    sharded_at,
    step_of,
)
from megatron.bytescale.features.drafts.flags import HeadOptions
from megatron.bytescale.inference.engine import Decoder
from megatron.bytescale.inference.heads_folder import (
    TENSORS,
    is_folder_of_heads,
    norms_apart,
    read_config,
    read_tensors,
    trunk_hash,
)
from megatron.bytescale.training.initialize import use_gpu

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

ONE_PROCESS = {
    "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1, "sequence_parallel": False, "moe_token_dispatcher_type": "alltoall",
    "tensor_parallel_num_weight_shards": None, "expert_tensor_parallel_num_weight_shards": None,
    "overlap_p2p_comm": False, "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None,
    "gradient_accumulation_fusion": False, "pipeline_model_parallel_layout": None,
    "mtp_num_layers": None,  # the model decodes without these layers (DeepSeek-V3, section 2.2)
}  # fmt: skip
"""Training arguments that decoding overrides."""
CANNOT = {
    "ngram_layers": "n-gram memory", "heterogeneous_layers_config_path": "layers of unlike shapes",
    "heterogeneous_layers_config_encoded_json": "layers of unlike shapes",
}  # fmt: skip


SIZES = ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size", "max_position_embeddings",
         "ffn_hidden_size", "kv_channels", "num_query_groups", "seq_length")  # fmt: skip
NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
MAY_BE_ZERO = ("num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size",
               "moe_latent_size", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
               "v_head_dim")  # fmt: skip
KINDS: dict[object, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool, int, str)}
"""Type of a flag -> types of its values in checkpoints."""


def checkpoint_at(flag: str, folder: Path) -> Path:
    """Return the last checkpoint in a folder. Its pickled classes are allowed, unless the user trusts checkpoints.

    Raises ValueError if there is none, it is not readable, or a class is not allowed.
    """
    checkpoint = sharded_at(flag, folder)
    try:
        check_classes(checkpoint)
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from None
    return checkpoint


def checkpoint_arguments(checkpoint: Path) -> argparse.Namespace:
    """Return the training arguments in a checkpoint. Raises ValueError if they are missing or have bad values."""
    args = arguments_in(checkpoint)
    if args is None:
        raise ValueError(f"{checkpoint}: it holds no training arguments")
    try:
        check_arguments(args, elements_in(checkpoint))
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from None
    return args


def check_arguments(args: argparse.Namespace, elements: int) -> None:
    """Check the training arguments in a checkpoint against Megatron's parser and the checkpoint's tensors.

    Raises ValueError for a value of another type than its flag has, and for a model larger than ``elements`` numbers.
    """
    from megatron.bytescale.arguments.parse import whole_parser

    for action in whole_parser()._actions:
        value = getattr(args, action.dest, None)
        kind = action.type if action.type in (int, float) else bool if action.nargs == 0 else None
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is None or kind is None or isinstance(item, KINDS[kind]):
                continue
            raise ValueError(f"its argument {action.dest} is {str(item)[:40]!r}, not of type {kind.__name__}")
    sizes: dict[str, int] = {}
    for name in (*SIZES, *MAY_BE_ZERO):
        size = getattr(args, name, None)
        if size is None and name not in NEEDED:
            size = 1
        least = 0 if name in MAY_BE_ZERO else 1
        if not isinstance(size, int) or isinstance(size, bool) or not least <= size <= MOST:
            raise ValueError(f"its argument {name} is {str(size)[:40]!r}")
        sizes[name] = size
    products = [("num_layers", "hidden_size"), ("hidden_size", "padded_vocab_size")]
    if not getattr(args, "num_experts", None):
        products.append(("hidden_size", "ffn_hidden_size"))
    for first, second in products:
        if sizes[first] * sizes[second] > elements:
            raise ValueError(f"its {first} {sizes[first]} and {second} {sizes[second]} need more than its tensors hold")


def check_size(shape: ModelShape, heads: DraftConfig | None, stored: int) -> None:
    """Raise ValueError for a model that needs more than twice the ``stored`` numbers of its files.

    Twice, because the shape does not tell which tensors are shared.
    """
    needed = num_parameters(shape) + expert_parameters(shape)
    if heads is not None:
        layer = replace(shape.part(1), num_expert_layers=0, vocab=0)
        needed += heads.num_layers * num_parameters(layer)
        needed += (heads.num_heads if heads.kind == "medusa" else 0) * shape.hidden**2
    if needed > 2 * stored:
        raise ValueError(f"these settings make a model of {needed:,.0f} parameters; its files hold {stored:,} numbers")


def check_gate(load: Path, checkpoint: Path, args: argparse.Namespace) -> None:
    """Raise ValueError if a gate still chose the experts at the step of a checkpoint, not Megatron's router."""
    steps, step = getattr(args, "moe_dts_steps", None) or 0, step_of(checkpoint)
    if step is not None and step < steps:
        raise ValueError(
            f"--load {load}: its gate starts dense and ends at step {steps} (--moe-dts-steps), and this is step "
            f"{step}: train it further"
        )


def heads_of(args: argparse.Namespace, checkpoint: Path) -> DraftConfig | None:
    """Return a checkpoint's head settings, or None without heads. Raises ValueError if head tensors are missing."""
    if getattr(args, "draft_heads", None) is None:
        return None
    config = options_of(args, HeadOptions).config()
    if not any(name.startswith("draft_heads.") for name in names_in(checkpoint)):
        raise ValueError(f"{checkpoint}: the tensors of its draft heads are missing")
    return config


@dataclass(frozen=True)
class TrunkArguments:
    """Megatron's arguments, under the same names, on which a model and heads trained on it must agree."""

    num_attention_heads: int
    group_query_attention: bool
    num_query_groups: int | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    padded_vocab_size: int | None = None
    vocab_size: int | None = None
    tokenizer_type: str | None = None
    normalization: str | None = None
    position_embedding_type: str | None = None
    swiglu: bool | None = None
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_latent_size: int | None = None
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None

    def shape(self) -> dict[str, object]:
        """Return shapes and vocabulary size by name; only models with experts or latents have sizes of these."""
        experts = {"num_experts": self.num_experts, "moe_ffn_hidden_size": self.moe_ffn_hidden_size}
        experts |= {"moe_latent_size": self.moe_latent_size} if self.moe_latent_size else {}
        latents = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        shares_keys = self.group_query_attention and self.num_query_groups is not None
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups if shares_keys else self.num_attention_heads,
            "kv_channels": self.kv_channels,
            "padded_vocab_size": self.padded_vocab_size,
            "vocab_size": self.vocab_size,
            "tokenizer_type": self.tokenizer_type,
            "normalization": self.normalization,
            "position_embedding_type": self.position_embedding_type,
            "swiglu": self.swiglu,
            **(experts if self.num_experts else {}),
            **({name: getattr(self, name) for name in latents} if self.multi_latent_attention else {}),
        }


def check_trunk(draft: Path | None, theirs: Mapping[str, object], mine: Mapping[str, object]) -> None:
    """Raise ValueError unless heads belong to a model with the same shapes and vocabulary size."""
    if trunk_hash(theirs) != trunk_hash(mine):
        name = next(key for key in (*mine, *theirs) if mine.get(key) != theirs.get(key))
        raise ValueError(
            f"--draft {draft}: heads of another model: its {name} is {theirs.get(name)}, not {mine.get(name)}"
        )


@dataclass(frozen=True)
class Heads:
    """The location and settings of draft heads; ``settings`` None: there are no heads.

    Attributes:
        folder: checkpoint of Megatron's, or folder of heads.
        settings: settings of the heads.
        trunk: shapes and vocabulary size of the heads' model.
        on_their_own: whether ``folder`` contains only heads.
    """

    folder: Path
    settings: DraftConfig | None
    trunk: dict[str, object]
    on_their_own: bool = False

    def elements(self) -> int:
        """Return the most numbers that the files of the folder hold."""
        return (self.folder / TENSORS).stat().st_size if self.on_their_own else elements_in(self.folder)


def open_heads(draft: Path) -> Heads:
    """Return the heads of ``--draft``. Raises ValueError if it has no readable heads."""
    if is_folder_of_heads(draft):
        return Heads(draft, *read_config(draft), on_their_own=True)
    checkpoint = checkpoint_at("--draft", draft)
    args = checkpoint_arguments(checkpoint)
    heads = Heads(checkpoint, heads_of(args, checkpoint), options_of(args, TrunkArguments).shape())
    if heads.settings is None:
        raise ValueError(f"--draft {draft}: this checkpoint has no draft heads")
    return heads


def open_decoder(load: Path, draft: Path | None, on_cpu: bool) -> tuple[Decoder, Any]:
    """Return the decoder of a checkpoint, and the training arguments in the checkpoint.

    Collective on the processes that torchrun has started, if any: the model is split over them.

    Args:
        load: folder of checkpoints with the model and optionally heads.
        draft: folder of heads, or of checkpoints with heads; None: use the heads in ``load``, if any.
        on_cpu: whether to decode on CPU even if there is a GPU.

    Raises:
        ValueError: a checkpoint is not readable, its model cannot decode here, or the heads belong to another model.
    """
    checkpoint = checkpoint_at("--load", load)
    stand_ins = cpu.install_if_wanted(["--cpu"] if on_cpu else [])  # before the first import of Megatron
    args = checkpoint_arguments(checkpoint)
    for name, kind in CANNOT.items():
        if getattr(args, name, None):
            raise ValueError(f"--load {load}: models with {kind} cannot decode here")
    check_gate(load, checkpoint, args)
    if draft is None:
        heads = Heads(checkpoint, heads_of(args, checkpoint), options_of(args, TrunkArguments).shape())
    else:
        heads = open_heads(draft)
    check_trunk(draft, heads.trunk, options_of(args, TrunkArguments).shape())
    check_cut(options_of(args, TrunkArguments).shape(), process_count())
    stored = elements_in(checkpoint) + (0 if heads.folder == checkpoint else heads.elements())
    try:
        model = build_model(args, heads.settings, stand_ins is not None, stored)
    except ValueError as error:
        raise ValueError(f"--load {load}: {error}") from None
    read_weights(model, checkpoint, heads)
    return Decoder(model, getattr(model, "draft_heads", None), args.max_position_embeddings), args


def process_count() -> int:
    """Return the number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_cut(shape: Mapping[str, object], ranks: int) -> None:
    """Raise ValueError for a model that cannot be split over ``ranks`` tensor-parallel ranks."""
    cut = ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "moe_ffn_hidden_size", "padded_vocab_size")
    for name in cut:
        if int(str(shape.get(name) or 0)) % ranks:
            raise ValueError(f"{ranks} processes cannot share this model: its {name} is {shape[name]}")


def split_of(args: argparse.Namespace, ranks: int) -> dict[str, int | None]:
    """Return how ranks share a model. Each has a part of all experts or, because Megatron splits no expert with biases,
    some whole experts.
    """
    has_biases = getattr(args, "num_experts", None) and args.add_bias_linear
    experts = (ranks, 1) if has_biases and args.num_experts % ranks == 0 else (1, None)
    names = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
    return dict(zip(names, (ranks, *experts), strict=True))


def join_processes(on_cpu: bool) -> None:
    """Join the processes that torchrun has started, or create a group of one process."""
    backend = "gloo" if on_cpu else "nccl"
    if not on_cpu:
        use_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    if process_count() > 1:
        torch.distributed.init_process_group(backend)
    else:
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)


def build_model(args: argparse.Namespace, heads: DraftConfig | None, on_cpu: bool, stored: int) -> GPTModel:
    """Build Megatron's model from training arguments, with heads but without weights. Call it once per process.

    ``stored``: numbers in the files of the weights. Raises ValueError if the arguments make no model, or a model that
    the files cannot fill.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    device = torch.device("cpu" if on_cpu else "cuda")
    if not torch.distributed.is_initialized():
        join_processes(on_cpu)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sizes = split_of(args, ranks)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(**sizes)
    vars(args).update({**ONE_PROCESS, **sizes}, use_cpu_initialization=on_cpu, world_size=ranks, rank=rank)
    model_parallel_cuda_manual_seed(1)
    try:
        check_size(model_shape(args), heads, stored)
        return _model_of(args, heads, device)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        reason = one_line(error, 200) or type(error).__name__  # Megatron and torch raise many types for bad sizes
        raise ValueError(f"these settings make no model ({reason})") from None


def _model_of(args: argparse.Namespace, heads: DraftConfig | None, device: torch.device) -> GPTModel:
    """Return Megatron's model of training arguments, with heads but without weights."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder

    from bytescale_ext.attention.kernels.table import choose_kernel
    from megatron.bytescale.arguments.model_config import model_config
    from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import use_document_positions
    from megatron.bytescale.core.models.gpt.draft_heads import DraftHeads
    from megatron.bytescale.core.models.gpt.gpt_layer_specs import dense_layer_spec, document_layer_spec
    from megatron.bytescale.core.models.gpt.trunk import HEADS
    from megatron.bytescale.inference.cache import with_cached_attention
    from megatron.bytescale.runtime import Runtime

    config = model_config(args)
    shape, windows = model_shape(args), args.window_size is not None
    inputs = device, args.params_dtype, shape.head_dim
    kernel = choose_kernel(*inputs, windows=windows, value_dim=shape.value_dim)[0]
    runtime = Runtime.alone(shape, args.params_dtype, device, kernel)
    layers = document_layer_spec(runtime)
    config.transformer_layer_spec = lambda config, vp_stage: with_cached_attention(layers(config, vp_stage), runtime)
    model: GPTModel = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    if heads is not None:
        layer = dense_layer_spec(model.transformer_layer_spec, args.transformer_impl == "transformer_engine")
        model.add_module(HEADS, DraftHeads(model.config, heads, layer))
    use_document_positions([model])
    return model.to(device=device, dtype=args.params_dtype).eval()


def read_weights(model: GPTModel, checkpoint: Path, heads: Heads) -> None:
    """Read the weights of a model and of its heads. Raises ValueError if tensors are missing."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from megatron.bytescale.core.models.gpt.trunk import HEADS

    metadata: dict[str, object] = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    wanted = model.sharded_state_dict(metadata=metadata)
    of_heads = {name: wanted.pop(name) for name in list(wanted) if name.startswith(f"{HEADS}.")}
    if heads.on_their_own:
        copy_heads(model.get_submodule(HEADS), read_tensors(heads.folder, heads.trunk))
        of_heads = {}
    state: dict[str, object] = {}
    for part, folder in ((wanted, checkpoint), (of_heads, heads.folder)):
        stored = set(names_in(folder)) if part else set()
        tensors = (tensor for tensor in part.values() if isinstance(tensor, ShardedTensor | ShardedTensorFactory))
        if missing := sorted({tensor.key for tensor in tensors} - stored):
            raise ValueError(f"{folder}: tensors are missing, such as {missing[0]}")
        with one_line_if_damaged(folder):
            loaded = dist_checkpointing.load(part, str(folder)) if part else {}
        state.update({name: loaded[name] for name in part})
    result = model.load_state_dict(state, strict=not heads.on_their_own)
    assert all(name.startswith(f"{HEADS}.") for name in result.missing_keys), f"{result=}"


def copy_heads(module: torch.nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Copy whole head tensors of any shape, under Megatron's names, to heads; a rank may hold only a part of them.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    from megatron.bytescale.core.models.gpt.draft_heads import part_of_rank

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for its_name, parameter in module.named_parameters():
        name = norms_apart(its_name)
        if name not in whole:
            raise ValueError(f"--draft: the heads have no tensor {name}")
        value, dim = whole[name], getattr(parameter, "partition_dim", -1)
        if getattr(parameter, "tensor_model_parallel", False) and dim >= 0:
            is_gated = "linear_fc1" in name and bool(module.config.gated_linear_unit)  # type: ignore[union-attr]
            value = part_of_rank(value, dim, is_gated, rank, ranks)
        if value.shape != parameter.shape:
            raise ValueError(f"--draft: the tensor {name} has the shape {tuple(whole[name].shape)}")
        with torch.no_grad():
            parameter.copy_(value)
