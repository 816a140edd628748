"""The values that all features need from Megatron's arguments: model, measured cost, ranks, process."""

from __future__ import annotations

import os
from typing import Any

from bytescale_ext.config.run import Process
from bytescale_ext.measure.cost_file import check_same_model, read_cost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import LatentShape, ModelShape
from bytescale_ext.plan.step.sizes import Cluster


def model_shape(args: Any) -> ModelShape:
    """Return the model's sizes that determine its FLOPs."""
    experts, latent = {}, _latent(args)
    if args.num_experts:
        every = args.moe_layer_freq  # a number, or one 0 or 1 per layer
        shared = args.moe_shared_expert_intermediate_size or 0
        experts = {
            "num_expert_layers": sum(every) if isinstance(every, list) else -(-args.num_layers // every),
            "expert_ffn_hidden": args.moe_router_topk * args.moe_ffn_hidden_size + shared,
            "num_experts": args.num_experts,
            "experts_per_token": args.moe_router_topk,
            "shared_ffn_hidden": shared,
            "expert_latent": getattr(args, "moe_latent_size", None) or 0,
            "later_experts": bool(every[-1] if isinstance(every, list) else (args.num_layers - 1) % every == 0),
        }
    return ModelShape(
        num_layers=args.num_layers,
        hidden=args.hidden_size,
        num_heads=args.num_attention_heads,
        num_kv_heads=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        head_dim=args.kv_channels if latent is None else args.qk_head_dim + args.qk_pos_emb_head_dim,
        ffn_hidden=args.ffn_hidden_size,
        gated=bool(args.swiglu or args.quick_geglu),
        vocab=args.padded_vocab_size,
        **experts,
        **_windows(args),
        later_layers=getattr(args, "mtp_num_layers", None) or 0,
        later_repeats=bool(getattr(args, "mtp_use_repeated_layer", False)),
        latent=latent,
    )


def _latent(args: Any) -> LatentShape | None:
    """Return the sizes of multi-latent attention, or None without it."""
    if not getattr(args, "multi_latent_attention", False):
        return None
    from megatron.bytescale.core.transformer.multi_latent_attention import latent_shape

    is_recomputed = args.recompute_granularity == "selective" and "mla_up_proj" in (args.recompute_modules or ())
    return latent_shape(args, is_plain=args.transformer_impl == "local" and not is_recomputed)


def _windows(args: Any) -> dict[str, Any]:
    """Return the number of layers with a sliding window, and the keys before its own that a token attends to there."""
    from megatron.core.transformer.utils import is_layer_window_attention

    layers = range(1, args.num_layers + 1)
    pattern = (args.window_size, args.window_attn_skip_freq)
    num_layers = sum(is_layer_window_attention(*pattern, layer) for layer in layers)
    return {"num_window_layers": num_layers, "window_tokens": args.window_size[0]} if num_layers else {}


def stage_layers(args: Any) -> tuple[int, ...]:
    """Return the transformer layers of each pipeline stage over all its virtual stages, in Megatron's layout."""
    num_layers, num_stages = args.num_layers, args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is not None:
        from megatron.core.transformer.enums import LayerType
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        layout = PipelineParallelLayerLayout(str(args.pipeline_model_parallel_layout), num_stages).layout
        return tuple(sum(chunk.count(LayerType.decoder) for chunk in chunks) for chunks in layout)
    ends = {0: args.decoder_first_pipeline_num_layers, num_stages - 1: args.decoder_last_pipeline_num_layers}
    given = {stage: layers for stage, layers in ends.items() if layers is not None}
    if given:
        others = (num_layers - sum(given.values())) // max(1, num_stages - len(given))
        return tuple(given.get(stage, others) for stage in range(num_stages))
    embedding = int(args.account_for_embedding_in_pipeline_split)
    loss = int(args.account_for_loss_in_pipeline_split)
    each = (num_layers + embedding + loss) // num_stages
    last = num_stages - 1
    return tuple(each - embedding * (stage == 0) - loss * (stage == last) for stage in range(num_stages))


def measured_cost(args: Any, shape: ModelShape) -> ModelCost | None:
    """Return the costs in ``--cost-file``, or None without the flag.

    Raises ValueError if the file is damaged or belongs to another model.
    """
    if args.cost_file is None:
        return None
    dtype = str(args.params_dtype).removeprefix("torch.")
    measured = read_cost(args.cost_file)
    return check_same_model(measured, shape, args.tensor_model_parallel_size, dtype, args.cost_file)


def cluster(args: Any) -> Cluster:
    """Return the number of HDP ranks and the maximum tokens of a micro-batch per rank."""
    tensor_ranks = args.tensor_model_parallel_size
    model_ranks = tensor_ranks * args.pipeline_model_parallel_size
    num_ranks = args.world_size // model_ranks
    tokens = args.hdp_tokens_per_rank or args.micro_batch_size * args.seq_length // args.context_parallel_size
    distance = model_ranks if args.use_tp_pp_dp_mapping else tensor_ranks
    ranks_per_node = args.hdp_ranks_per_node or ranks_of_a_node(distance, num_ranks)
    return Cluster(num_ranks, tokens, ranks_per_node, args.hdp_hierarchical_rings or "auto")


def ranks_of_a_node(distance: int, num_ranks: int) -> int | None:
    """Return the number of HDP ranks on this node, from torchrun's LOCAL_WORLD_SIZE.

    Returns None if HDP ranks do not divide the node evenly, or if the node has all of them.

    Args:
        distance: number of processes from one HDP rank to the next in Megatron's numbering.
        num_ranks: total number of HDP ranks.
    """
    ranks, rest = divmod(int(os.environ.get("LOCAL_WORLD_SIZE", "0")), distance)
    return ranks if ranks and not rest and ranks < num_ranks and not num_ranks % ranks else None


def process(args: Any) -> Process:
    """Return the rank, the device and the settings of this process."""
    return Process(
        rank=args.rank,
        on_cuda=args.distributed_backend == "nccl",
        dtype=args.params_dtype,
        tensor_parallel=args.tensor_model_parallel_size,
        timeout_minutes=args.distributed_timeout_minutes,
        log_interval=args.log_interval,
        train_iters=args.train_iters or 0,
        stage=stage_of(args),
        hdp_rank=hdp_rank_of(args),
    )


def stage_of(args: Any) -> int:
    """Return the pipeline stage of this process in Megatron's numbering."""
    num_stages, tensor_ranks = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    distance = tensor_ranks if args.use_tp_pp_dp_mapping else args.world_size // num_stages
    return int(args.rank // distance % num_stages)


def hdp_rank_of(args: Any) -> int:
    """Return this process's index among the pipelines that train side by side, in Megatron's numbering."""
    num_stages, tensor_ranks = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    if args.use_tp_pp_dp_mapping:
        return int(args.rank // (tensor_ranks * num_stages))
    return int(args.rank // tensor_ranks % (args.world_size // (tensor_ranks * num_stages)))
