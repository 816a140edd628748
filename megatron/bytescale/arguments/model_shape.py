"""What all features need from Megatron's arguments: the model, its measured cost, the ranks, this process."""

from __future__ import annotations

import os
from typing import Any

from bytescale_ext.config.run import Process
from bytescale_ext.measure.cost_file import check_same_model, read_cost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.step.sizes import Cluster


def model_shape(args: Any) -> ModelShape:
    """Return the sizes of the model that its FLOPs depend on."""
    experts = {}
    if args.num_experts:
        every = args.moe_layer_freq  # a number, or 0 or 1 for each layer
        experts = {
            "num_expert_layers": sum(every) if isinstance(every, list) else -(-args.num_layers // every),
            "expert_ffn_hidden": args.moe_router_topk * args.moe_ffn_hidden_size
            + (args.moe_shared_expert_intermediate_size or 0),
            "num_experts": args.num_experts,
        }
    return ModelShape(
        num_layers=args.num_layers,
        hidden=args.hidden_size,
        num_heads=args.num_attention_heads,
        num_kv_heads=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        head_dim=args.kv_channels,
        ffn_hidden=args.ffn_hidden_size,
        gated=bool(args.swiglu),
        vocab=args.padded_vocab_size,
        **experts,
    )


def measured_cost(args: Any, shape: ModelShape) -> ModelCost | None:
    """Return the costs in ``--cost-file``, or None without it.

    Raises ValueError for a file that is damaged or for another model.
    """
    if args.cost_file is None:
        return None
    dtype = str(args.params_dtype).removeprefix("torch.")
    measured = read_cost(args.cost_file)
    return check_same_model(measured, shape, args.tensor_model_parallel_size, dtype, args.cost_file)


def cluster(args: Any) -> Cluster:
    """Return the HDP ranks and the most tokens of a micro-batch on one of them."""
    tensor_ranks = args.tensor_model_parallel_size
    model_ranks = tensor_ranks * args.pipeline_model_parallel_size
    num_ranks = args.world_size // model_ranks
    tokens = args.hdp_tokens_per_rank or args.micro_batch_size * args.seq_length // args.context_parallel_size
    distance = model_ranks if args.use_tp_pp_dp_mapping else tensor_ranks
    return Cluster(num_ranks, tokens, args.hdp_ranks_per_node or ranks_of_a_node(distance, num_ranks))


def ranks_of_a_node(distance: int, num_ranks: int) -> int | None:
    """Return the HDP ranks of this node, by torchrun's LOCAL_WORLD_SIZE.

    Returns None where HDP ranks do not fill the node evenly, or where it holds all of them.

    Args:
        distance: processes from one HDP rank to the next, as Megatron numbers ranks.
        num_ranks: all HDP ranks.
    """
    ranks, rest = divmod(int(os.environ.get("LOCAL_WORLD_SIZE", "0")), distance)
    return ranks if ranks and not rest and ranks < num_ranks and not num_ranks % ranks else None


def process(args: Any) -> Process:
    """Return the rank, the device and the settings of this process."""
    return Process(
        rank=args.rank,
        local_rank=args.local_rank,
        on_cuda=args.distributed_backend == "nccl",
        dtype=args.params_dtype,
        tensor_parallel=args.tensor_model_parallel_size,
        timeout_minutes=args.distributed_timeout_minutes,
        log_interval=args.log_interval,
    )
