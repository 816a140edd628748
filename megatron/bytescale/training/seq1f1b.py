"""Training in slices: flags, what they do not work with, the configuration, and the forward step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bytescale_ext.config import HdpConfig
from bytescale_ext.pipeline.config import SliceConfig
from bytescale_ext.plan.activation import key_value_bytes, layer_tensors
from bytescale_ext.plan.cost import ModelShape, StageCost
from bytescale_ext.plan.document_slices import SliceRule, affordable_tokens, kept_bytes
from bytescale_ext.plan.slices import PARTITIONS, layer_cost, parse_partition, slice_lengths
from megatron.bytescale.training.refusals import Refusal

FEATURE: Final = "--seq1f1b-splits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the group of Seq1F1B."""
    group = parser.add_argument_group("bytescale: pipelines in slices (Seq1F1B)")
    group.add_argument(
        "--seq1f1b-splits",
        type=int,
        metavar="K",
        help="Cut each micro-batch into K slices that pass the pipeline one after another. Default: Megatron's own "
        "way; so is 1, but with --seq1f1b-partition it is one slice by our code and kernel, to compare with.",
    )
    group.add_argument(
        "--seq1f1b-partition",
        metavar="NAME",
        help="What slices are equal in: time (default), flops or even; or the tokens of each, as L1,...,LK. "
        "`bytescale schedule` shows what each comes to.",
    )
    group.add_argument(
        "--seq1f1b-cost",
        type=Path,
        metavar="FILE",
        help="Measured costs of this model on this hardware, by `bytescale profile`, for the partition time. "
        "Default: FLOPs, with attention's backward pass at 2.5 times its forward pass.",
    )
    group.add_argument(
        "--seq1f1b-eager",
        action="store_true",
        help="Each stage runs two forwards ahead of the next one, not one, so that slices which differ in time do not "
        "wait for each other. Faster, and holds the activations of up to (stages - 1) / K micro-batches more.",
    )


def _row(flag: str, instead: str, applies: Callable[[Any], bool] | None = None) -> Refusal:
    name = flag.lstrip("-").replace("-", "_")
    return Refusal(flag, applies or (lambda args: bool(getattr(args, name, None))), instead)


_REMOVE = "remove it, or leave --seq1f1b-splits out"
REFUSALS: tuple[Refusal, ...] = (
    _row("--context-parallel-size > 1", "leave it at 1: its zigzag shares hold tokens from both ends of the sequence",
         lambda a: a.context_parallel_size > 1),
    _row("--hybrid-context-parallel", _REMOVE),
    _row("--reset-attention-mask", "it needs a mask over the whole sequence; use --hybrid-data-parallel for documents "
         "that do not see each other"),
    _row("--dataloader-inter-document-masking", "use --hybrid-data-parallel for documents that do not see each other"),
    _row("--sft", _REMOVE),
    _row("--attention-dropout > 0", "add --attention-dropout 0 (Megatron's default is 0.1)",
         lambda a: (a.attention_dropout or 0) > 0),
    _row("--multi-latent-attention", "its RoPE is inside of attention, where positions of slices are not known"),
    _row("--mtp-num-layers", "it needs tokens of the next slice"),
    _row("--hybrid-layer-pattern", "the state of Mamba's layers would have to pass from slice to slice"),
    _row("--hybrid-override-pattern", "the state of Mamba's layers would have to pass from slice to slice"),
    _row("--experimental-attention-variant", _REMOVE),
    _row("--num-experts", "not supported yet: the router's losses would be taken of each slice, not of the sequence"),
    _row("--heterogeneous-layers-config-path", _REMOVE),
    _row("--heterogeneous-layers-config-encoded-json", _REMOVE),
    _row("--spec", "slices bring a layer spec of their own"),
    _row("--transformer-impl inference_optimized", "use local or transformer_engine",
         lambda a: a.transformer_impl == "inference_optimized"),
    _row("--window-size", "sliding-window attention is not supported"),
    _row("--softmax-type", "use vanilla", lambda a: getattr(a, "softmax_type", "vanilla") != "vanilla"),
    _row("--attention-backend", "slices have kernels of their own", lambda a: a.attention_backend.name != "auto"),
    _row("--use-kitchen-attention", "slices have kernels of their own"),
    _row("--apply-query-key-layer-scaling", _REMOVE),
    _row("--qk-clip", _REMOVE),
    _row("--log-max-attention-logit", _REMOVE),
    _row("--position-embedding-type", "use rope, learned_absolute or none",
         lambda a: a.position_embedding_type not in ("rope", "learned_absolute", "none")),
    _row("--num-query-groups", "make it a divisor of --num-attention-heads",
         lambda a: a.group_query_attention and a.num_attention_heads % (a.num_query_groups or 1)),
    _row("--defer-embedding-wgrad-compute", "its first backward pass is not the first forward's"),
    _row("--delay-wgrad-compute", "it pairs forward and backward passes in another order"),
    _row("--overlap-moe-expert-parallel-comm", "it has a schedule of its own"),
    _row("--fine-grained-activation-offloading", "it brings back the oldest activations, not those of the last slice"),
    _row("--cpu-offloading-num-layers", "it brings back the oldest activations, not those of the last slice"),
    _row("--cuda-graph-impl", "slices change their shape", lambda a: a.cuda_graph_impl != "none"),
    _row("--enable-cuda-graph", "slices change their shape"),
    _row("--external-cuda-graph", "slices change their shape"),
    _row("--tp-comm-overlap", "its buffers have one fixed shape"),
    _row("--overlap-p2p-communication-warmup-flush", _REMOVE, lambda a: a.overlap_p2p_comm_warmup_flush),
    _row("--overlap-param-gather-with-optimizer-step", "give --overlap-param-gather alone"),
    _row("--use-megatron-fsdp", "use --use-distributed-optimizer"),
    _row("--use-torch-fsdp2", "use --use-distributed-optimizer"),
    _row("--fp8-format", "use bf16: FP8 needs aligned token counts", lambda a: bool(a.fp8)),
    _row("--fp4-format", "use bf16: FP4 needs aligned token counts", lambda a: bool(a.fp4)),
    _row("--te-precision-config-file", "it may choose FP8, which needs aligned token counts"),
    _row("--use-checkpoint-args", "give the model's flags on the command line"),
    _row("--perform-rl-step", _REMOVE),
    _row("--vision-pretraining", _REMOVE),
    _row("--logits-save-dir", _REMOVE),
    _row("--logits-load-dir", _REMOVE),
)  # fmt: skip


def is_on(args: argparse.Namespace) -> bool:
    """Whether micro-batches are run in slices, or in one by the same code."""
    return (args.seq1f1b_splits or 1) > 1 or (args.seq1f1b_splits == 1 and args.seq1f1b_partition is not None)


def set_defaults(args: argparse.Namespace) -> None:
    """Refuse what slices do not run with, and switch on what they are built on. Before Megatron's own checks.

    Raises ValueError, naming the flag.
    """
    if args.seq1f1b_splits is None:
        for name in ("seq1f1b_partition", "seq1f1b_cost", "seq1f1b_eager"):
            if getattr(args, name) not in (None, False):
                raise ValueError(f"--{name.replace('_', '-')} needs --seq1f1b-splits")
    elif args.seq1f1b_splits < 1:
        raise ValueError(f"--seq1f1b-splits {args.seq1f1b_splits} must be at least 1; 1 does not cut micro-batches")
    if args.seq1f1b_eager:
        _check_eager(args)
    if not is_on(args):
        return
    for refusal in REFUSALS:
        if refusal.applies(args):
            raise ValueError(f"--seq1f1b-splits does not work with {refusal.flag}: {refusal.instead}")
    if args.seq1f1b_cost is not None and (args.seq1f1b_partition or "time") != "time":
        raise ValueError(f"--seq1f1b-cost has no effect on --seq1f1b-partition {args.seq1f1b_partition}; use time")
    args.create_attention_mask_in_dataloader = False  # masks of whole sequences; ours follow from the slices
    args.overlap_p2p_comm = False  # messages in batches: their order is what the schedule was checked for


def _check_eager(args: Any) -> None:
    if args.seq1f1b_splits == 1:
        raise ValueError("--seq1f1b-eager needs --seq1f1b-splits of 2 or more")
    if args.pipeline_model_parallel_size == 1:
        raise ValueError("--seq1f1b-eager needs a --pipeline-model-parallel-size of 2 or more")
    chunks = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    if any(getattr(args, name) for name in chunks):
        raise ValueError("--seq1f1b-eager does not work with virtual stages, which run two forwards ahead as it is")


def document_slice_rule(args: Any, config: HdpConfig, cost: StageCost, shape: ModelShape) -> SliceRule:
    """How micro-batches of documents are cut. ``cost``: what the planner balances, in which "time" slices are equal.

    Raises ValueError, naming the flag, for what only samples of one length can have.
    """
    partition = parse_partition(args.seq1f1b_partition or "time")
    if not isinstance(partition, str):
        raise ValueError(
            f"--seq1f1b-partition {args.seq1f1b_partition} does not work with --hybrid-data-parallel, whose "
            f"micro-batches differ in length: use {', '.join(PARTITIONS)}"
        )
    if args.seq1f1b_cost is not None:
        raise ValueError("--seq1f1b-cost does not work with --hybrid-data-parallel: give the costs as --hdp-cost")
    _check_virtual_stages(args)
    equal = {"time": cost.both, "flops": layer_cost(shape, "flops").both, "even": None}[partition]
    return SliceRule(config.num_slices, equal, config.rows_multiple, _kept_tokens(args, config, shape))


def _kept_tokens(args: Any, config: HdpConfig, shape: ModelShape) -> int:
    """The longest sequence whose keys are kept between slices: as told, or what costs no memory.

    Where activations are recomputed or leave the device, a token surely keeps only its layer's input.
    """
    if config.kept_keys is not None:
        return config.kept_keys
    tensors = layer_tensors(shape, tensor_parallel=args.tensor_model_parallel_size)
    shares = (args.swap_fraction, args.recompute_fraction)
    if args.recompute_granularity or args.activation_policy != "none" or shares != (None, None):
        tensors = tensors[:1]
    return affordable_tokens(
        config.num_stages,
        config.num_slices,
        config.tokens_per_rank,
        sum(tensor.bytes_per_token for tensor in tensors),
        key_value_bytes(shape, args.tensor_model_parallel_size),
        config.eager,
    )


def kept_note(args: Any, config: HdpConfig, kept_tokens: int, shape: ModelShape) -> str:
    """What to tell the user once of keys that are kept between slices."""
    note = f"keys of documents of up to {kept_tokens:,} tokens are kept from slice to slice"
    longest = config.longest_sequence
    if kept_tokens >= longest or config.num_stages == 1:
        return note
    sizes = (config.num_stages, config.num_slices, longest)
    key_bytes = key_value_bytes(shape, args.tensor_model_parallel_size)
    layers = -(-args.num_layers // config.num_stages)
    num_bytes = layers * kept_bytes(*sizes, key_bytes, config.eager)
    return (
        f"{note}. Longer ones send theirs again with each slice, which may take longer than slices save: with "
        f"--hdp-kept-keys {longest} none does, for up to {num_bytes / 1e9:,.1f} GB of keys on a rank; "
        "or use fewer slices (`bytescale simulate` compares)"
    )


def slice_config(args: Any, shape: ModelShape) -> SliceConfig:
    """The frozen configuration, from arguments that Megatron has checked.

    Raises:
        ValueError: slices or groups of virtual stages that do not fit, with the nearest that do.
    """
    partition = parse_partition(args.seq1f1b_partition or "time")
    row_shares = args.tensor_model_parallel_size if args.sequence_parallel else 1
    cost = layer_cost(shape, str(partition), _measured(args, shape)).both if isinstance(partition, str) else None
    lengths = slice_lengths(args.seq_length, args.seq1f1b_splits, partition, cost, row_shares)
    num_stages, num_chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    _check_virtual_stages(args)
    if num_chunks > 1 and args.rampup_batch_size:
        raise ValueError(
            "--seq1f1b-splits with virtual stages does not work with --rampup-batch-size: remove one of them"
        )
    config = SliceConfig(lengths, num_stages, num_chunks, row_shares, args.seq1f1b_eager)
    if not args.rampup_batch_size:
        config.schedule(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
    if args.eval_iters and args.eval_global_batch_size:
        samples = (args.eval_micro_batch_size or args.micro_batch_size) * args.data_parallel_size
        config.schedule(args.eval_global_batch_size // samples)
    return config


def _check_virtual_stages(args: Any) -> None:
    num_stages = args.pipeline_model_parallel_size
    if (args.virtual_pipeline_model_parallel_size or 1) > 1 and num_stages < 3:
        raise ValueError(
            f"--seq1f1b-splits with virtual stages needs --pipeline-model-parallel-size 3 or more, not {num_stages}: "
            "both neighbours would be one process, and their messages would be mixed up"
        )


def _measured(args: Any, shape: ModelShape) -> Any:
    if args.seq1f1b_cost is None:
        return None
    from bytescale_ext.cost_file import check_same_model, read_cost

    dtype = str(args.params_dtype).removeprefix("torch.")
    path, tensor_ranks = args.seq1f1b_cost, args.tensor_model_parallel_size
    return check_same_model(read_cost(path), shape, tensor_ranks, dtype, path)


def one_stage_note(num_stages: int) -> str | None:
    """What to tell the user once, on one pipeline stage."""
    if num_stages > 1:
        return None
    return (
        "one pipeline stage has no idle time for slices to fill. With --recompute-granularity full they bound the "
        "activations of the layer that is computed; without it they only cost time"
    )
