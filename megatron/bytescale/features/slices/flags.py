"""Pipelines in slices (Seq1F1B, Sun et al. 2024): micro-batches are cut, and slices pass the stages one by one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.slices import DocumentSliceConfig, SliceConfig
from bytescale_ext.plan.activation.policies import in_gigabytes
from bytescale_ext.plan.activation.tensors import expert_bytes, layer_tensors
from bytescale_ext.plan.cost.model_shape import key_value_bytes
from bytescale_ext.plan.evaluate.slicing_choice import OPTIONS, SlicingChoice
from bytescale_ext.plan.memory.stage_memory import StageMemory
from bytescale_ext.plan.schedule.check_slices import check_slices
from bytescale_ext.plan.schedule.document_slices import SliceRule, affordable_tokens, kept_bytes
from bytescale_ext.plan.schedule.slices import PARTITIONS, layer_cost, parse_partition, slice_lengths
from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale.arguments.stage_layers import expert_load, layer_settings, stage_settings
from megatron.bytescale.features.activations.flags import cost_in_seconds, machine_of
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


ORDER_FLAG: Final = "--seq1f1b-eager"
ZERO_BUBBLE_FLAG: Final = "--seq1f1b-zero-bubble"
AUTO: Final = "auto"
"""The planner chooses the slices of each step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Seq1F1B."""
    group = parser.add_argument_group("bytescale: pipelines in slices (Seq1F1B)")
    group.add_argument(
        "--seq1f1b-slices",
        type=slices_value,
        metavar="K",
        help="Cut each micro-batch into K slices that pass the pipeline one after another. Default: 1, not cut. With "
        f"--hybrid-data-parallel also {AUTO}: the planner chooses, for each step, slices, order and kept keys within "
        "--device-memory-gb.",
    )
    group.add_argument(
        "--seq1f1b-partition",
        metavar="NAME",
        help="What is equal in all slices: time (default), flops, or tokens (even); or their tokens as L1,...,LK. "
        "`bytescale schedule` shows the lengths for each.",
    )
    group.add_argument(
        ORDER_FLAG,
        action="store_true",
        help="Each stage runs two forwards ahead of the next one instead of one, so that slices of different "
        "duration wait less for each other. Faster, but holds up to (stages - 1) / K micro-batches more activations.",
    )
    group.add_argument(
        "--hdp-kept-keys",
        type=int,
        metavar="TOKENS",
        help="With --hybrid-data-parallel: each rank keeps the keys that it receives of documents of up to this "
        "many tokens, so that they travel once, not again with each slice. Default: as many as fit in the memory that "
        "1F1B would take; 0: none.",
    )
    group.add_argument(
        "--hdp-swapped-keys",
        type=int,
        metavar="TOKENS",
        help="With --hybrid-data-parallel: keep the keys of documents longer than --hdp-kept-keys and of up to this "
        "many tokens in host memory (--host-memory-gb), from which each slice reads those before it. Default: 0, "
        f"none. With --seq1f1b-slices {AUTO} and --host-memory-gb the planner chooses.",
    )


def slices_value(text: str) -> int | str:
    """Return the value of ``--seq1f1b-slices``. Raises ValueError for a text that is neither a number nor "auto"."""
    return text if text == AUTO else int(text)


def is_on(args: Any) -> bool:
    """Return whether the schedule is ours: micro-batches are cut into slices, or backward passes are split."""
    return args.seq1f1b_slices not in (None, 1) or args.seq1f1b_zero_bubble


def before_checks(args: Any) -> None:
    """Check the flags of slices, and set the Megatron arguments that slices need."""
    if args.seq1f1b_slices is None:
        args.seq1f1b_slices = 1
    if args.seq1f1b_slices == AUTO:
        _check_auto(args)
    elif args.seq1f1b_slices < 1:
        raise ValueError(f"--seq1f1b-slices {args.seq1f1b_slices} must be at least 1; 1 does not cut micro-batches")
    for flag, tokens in (("--hdp-kept-keys", args.hdp_kept_keys), ("--hdp-swapped-keys", args.hdp_swapped_keys)):
        if tokens is not None and not args.hybrid_data_parallel:
            raise ValueError(f"{flag} needs --hybrid-data-parallel")
        if tokens is not None and tokens < 0:
            raise ValueError(f"{flag} must be at least 0, got {tokens}")
    if args.hdp_swapped_keys and args.seq1f1b_slices == 1:
        raise ValueError("--hdp-swapped-keys needs --seq1f1b-slices of 2 or more")
    if args.hdp_swapped_keys and not args.host_memory_gb:
        raise ValueError("--hdp-swapped-keys needs --host-memory-gb, the host memory of each process for keys")
    if slicing_of(args).order:
        _check_order(args)
    args.create_attention_mask_in_dataloader = False  # a mask covers a whole sequence; slices need none


def after_checks(args: Any) -> None:
    """Overlap messages in warm-up and flush too, where Megatron has left overlapping on: with virtual stages."""
    if args.overlap_p2p_comm:
        args.overlap_p2p_comm_warmup_flush = True


def slicing_of(args: Any) -> Slicing:
    """Return the slices of the flags, without kept keys; the most slices where the planner chooses."""
    if args.seq1f1b_slices == AUTO:
        return OPTIONS[-1]
    return Slicing(args.seq1f1b_slices, eager=args.seq1f1b_eager, zero_bubble=args.seq1f1b_zero_bubble)


def flags_of(slicing: Slicing) -> list[str]:
    """Return the flags that ``slicing_of`` reads."""
    flags = ((ORDER_FLAG, slicing.eager), (ZERO_BUBBLE_FLAG, slicing.zero_bubble))
    return ["--seq1f1b-slices", str(slicing.num_slices), *(flag for flag, is_on in flags if is_on)]


def _check_auto(args: Any) -> None:
    """Raise ValueError for flags with which the planner cannot choose the slices of each step."""
    what, by_hand = f"--seq1f1b-slices {AUTO}", "or give a number of slices"
    if not args.hybrid_data_parallel:
        raise ValueError(f"{what} needs --hybrid-data-parallel, whose planner chooses them; {by_hand}")
    if args.device_memory_gb is None:
        raise ValueError(f"{what} needs --device-memory-gb, the device memory for activations; {by_hand}")
    if not args.device_memory_gb > 0:
        raise ValueError(f"--device-memory-gb {args.device_memory_gb:g} is not an amount of memory")
    chosen = {
        "--hdp-kept-keys": args.hdp_kept_keys,
        "--hdp-swapped-keys": args.hdp_swapped_keys,
        ORDER_FLAG: args.seq1f1b_eager or None,
    }
    for flag, value in chosen.items():
        if value is not None:
            raise ValueError(f"{what} chooses what {flag} sets: remove {flag}, {by_hand}")


def _check_order(args: Any) -> None:
    flag = "--seq1f1b-slices auto" if args.seq1f1b_slices == AUTO else ORDER_FLAG
    if args.pipeline_model_parallel_size == 1:
        raise ValueError(f"{flag} needs a --pipeline-model-parallel-size of 2 or more")
    chunks = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    if any(getattr(args, name) for name in chunks):
        raise ValueError(f"{flag} does not work with virtual stages, which run two forwards ahead anyway")


def resolve(args: Any, run: RunConfig) -> SliceConfig | DocumentSliceConfig:
    """Return how samples of one length are cut, or how documents are under hybrid data parallelism."""
    hdp = run.find(HdpConfig)
    return sample_slices(args, run) if hdp is None else document_slices(args, run, hdp)


def sample_slices(args: Any, run: RunConfig) -> SliceConfig:
    """Return the slices of samples of one length.

    Raises:
        ValueError: slices or groups of virtual stages do not fit; the message gives the nearest that do.
    """
    partition = parse_partition(args.seq1f1b_partition or "time")
    row_shares = args.tensor_model_parallel_size if args.sequence_parallel else 1
    cost = layer_cost(run.shape, partition, run.cost).both if isinstance(partition, str) else None
    lengths = slice_lengths(args.seq_length, args.seq1f1b_slices, partition, cost, row_shares)
    check_slices(lengths, args.seq_length, args.seq1f1b_slices, row_shares)
    num_chunks = args.virtual_pipeline_model_parallel_size or 1
    if num_chunks > 1 and args.step_batch_size_schedule:
        raise ValueError(
            "--seq1f1b-slices with virtual stages does not work with --step-batch-size-schedule: remove one of them"
        )
    config = SliceConfig(slicing_of(args), lengths, args.pipeline_model_parallel_size, num_chunks, row_shares)
    if not args.step_batch_size_schedule:
        config.schedule(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
    if args.eval_iters and args.eval_global_batch_size:
        samples = (args.eval_micro_batch_size or args.micro_batch_size) * args.data_parallel_size
        config.schedule(args.eval_global_batch_size // samples)
    return config


def document_slices(args: Any, run: RunConfig, hdp: HdpConfig) -> DocumentSliceConfig:
    """Return the slices of micro-batches of documents; the partition "time" makes them equal in the planner's cost.

    Raises:
        ValueError: a partition that only samples of one length can have.
    """
    partition = parse_partition(args.seq1f1b_partition or "time")
    if not isinstance(partition, str):
        raise ValueError(
            f"--seq1f1b-partition {args.seq1f1b_partition} does not work with --hybrid-data-parallel, whose "
            f"micro-batches differ in length: use {', '.join(PARTITIONS)}"
        )
    equal = {"time": hdp.cost.both, "flops": layer_cost(run.shape, "flops").both, "even": None}[partition]
    if args.seq1f1b_slices == AUTO:
        return chosen_slices(args, run, SliceRule(OPTIONS[-1], equal, hdp.rows_multiple))
    kept_tokens = args.hdp_kept_keys if args.hdp_kept_keys is not None else _affordable_tokens(args, run)
    slicing = replace(slicing_of(args), kept_tokens=kept_tokens, swapped_tokens=args.hdp_swapped_keys or 0)
    config = DocumentSliceConfig(
        SliceRule(slicing, equal, hdp.rows_multiple), hdp.num_stages, host_bytes=_host_bytes(args, run)
    )
    if slicing.num_slices == 1:
        return config
    _check_host_memory(args, run.with_feature("slices", config))
    key_bytes = key_value_bytes(run.shape, args.tensor_model_parallel_size)
    return config.with_note(kept_note(config, hdp.longest_sequence, [key_bytes * n for n in run.stage_layers]))


def may_swap_keys(args: Any) -> bool:
    """Return whether keys may be kept in host memory: by flag, or where the planner chooses without a policy."""
    by_choice = args.seq1f1b_slices == AUTO and args.host_memory_gb and not _has_policy(args)
    return bool(args.hdp_swapped_keys or by_choice)


def _host_bytes(args: Any, run: RunConfig) -> float:
    """Return the host memory in which keys may be swapped."""
    return machine_of(args, run.shape).host_bytes if may_swap_keys(args) else 0.0


def _check_host_memory(args: Any, run: RunConfig) -> None:
    """Raise ValueError where the swapped keys of the longest documents exceed the host memory on a stage."""
    config = run.get(DocumentSliceConfig)
    stages = range(len(run.stage_layers)) if config.host_bytes else ()
    needed = max((stage_settings(args, run, stage).key_host_bytes for stage in stages), default=0.0)
    if needed > config.host_bytes:
        raise ValueError(
            f"keys of documents of up to {config.slicing.swapped_tokens} tokens take {in_gigabytes(needed)} GB of host "
            f"memory, and --host-memory-gb is {config.host_bytes / 1e9:.4g}: give at least that, or swap fewer keys"
        )


def chosen_slices(args: Any, run: RunConfig, rule: SliceRule) -> DocumentSliceConfig:
    """Return the choice of slices within the device memory for activations. Raises ValueError where none fits."""
    hdp, num_stages = run.get(HdpConfig), args.pipeline_model_parallel_size
    memory = stage_memory(args, run).without_states()
    choice = SlicingChoice.within(memory, args.device_memory_gb * 1e9, _host_bytes(args, run))
    if not _has_policy(args):  # else the policy checks what it leaves on the device
        choice.check_fits(hdp.cost.both, run.cluster.tokens_per_rank)
    note = f"each step runs in the slices that are fastest within {args.device_memory_gb:g} GB of activations and keys"
    return DocumentSliceConfig(rule, num_stages, note, choice, choice.host_bytes)


def stage_memory(args: Any, run: RunConfig) -> StageMemory:
    """Return the device memory of the stages, without activation policies.

    With ``--recompute-method block``, which recomputes some layers only, this is the memory without recomputation.
    """
    cost, element = cost_in_seconds(run), args.params_dtype.itemsize
    sizes, how = (element, cost.tensor_parallel), layer_settings(args, run)
    tensors = [one.bytes_per_token for one in layer_tensors(run.shape, *sizes, args.sequence_parallel, how.operators)]
    if run.cost is None:
        cost = replace(cost, layer_bytes=sum(tensors) + expert_bytes(run.shape, *sizes, expert_load(args)))
    memory = StageMemory.of(cost, run.stage_layers, run.cluster, how)
    memory = replace(memory, rows_multiple=run.get(HdpConfig).rows_multiple)
    memory = memory.with_virtual_stages() if args.virtual_pipeline_model_parallel_size else memory
    if args.recompute_granularity != "full" or args.recompute_method == "block":
        return memory
    return memory.recomputing(tensors[0], sliced=args.seq1f1b_slices not in (None, 1))


def _affordable_tokens(args: Any, run: RunConfig) -> int:
    """Return the longest sequence whose keys can be kept between slices at no cost in memory."""
    return affordable_tokens(
        args.pipeline_model_parallel_size,
        slicing_of(args),
        run.cluster.tokens_per_rank,
        _layer_bytes(args, run),
        key_value_bytes(run.shape, args.tensor_model_parallel_size),
    )


def _layer_bytes(args: Any, run: RunConfig) -> float:
    """Return the bytes of activations, of 16 bits each, that a token is sure to keep in a layer.

    Where activations are recomputed or leave the device, that is only the input of the layer.
    """
    tensors = layer_tensors(run.shape, tensor_parallel=args.tensor_model_parallel_size)
    if args.recompute_granularity or _has_policy(args):
        tensors = tensors[:1]
    return sum(tensor.bytes_per_token for tensor in tensors)


def _has_policy(args: Any) -> bool:
    """Return whether an activation policy plans what layers keep."""
    return args.activation_policy != "none" or (args.swap_fraction, args.recompute_fraction) != (None, None)


def kept_note(config: DocumentSliceConfig, longest: int, key_bytes: Sequence[float]) -> str:
    """Return what to tell the user about keys that are kept between slices.

    Args:
        config: the slices.
        longest: tokens of the longest sequence.
        key_bytes: of a token's keys and values in all layers of each stage.
    """
    slicing, num_stages = config.slicing, config.num_stages
    note = f"keys of documents of up to {slicing.kept_tokens:,} tokens are kept from slice to slice"
    if slicing.longest_kept > slicing.kept_tokens:
        note += f", those of up to {slicing.swapped_tokens:,} in host memory"
    if slicing.longest_kept >= longest or num_stages == 1:
        return note
    num_bytes = max(
        kept_bytes(num_stages, config.slicing, longest, each, stage) for stage, each in enumerate(key_bytes)
    )
    return (
        f"{note}. Longer ones send their keys again with each slice, which may cost more time than slices save: "
        f"--hdp-kept-keys {longest} avoids that, with up to {num_bytes / 1e9:,.1f} GB of keys on a rank; "
        "or use fewer slices (`bytescale simulate` compares them)"
    )


def borrowed_flags(args: Any) -> tuple[str, ...]:
    """Return the flags of activation policies that slices read: memory, and the link that swaps keys."""
    link = ("--host-memory-gb", "--link-gb-per-second", "--gpus-per-link")
    is_chosen = args.seq1f1b_slices == AUTO
    return (*("--device-memory-gb",) * is_chosen, *(link if is_chosen or args.hdp_swapped_keys else ()))


def build(training: Training, runtime: Runtime) -> Training:
    """Run each micro-batch in slices."""
    from megatron.bytescale.features.slices import build as slices

    if runtime.run.find(DocumentSliceConfig) is not None:
        return slices.cut_documents(training, runtime)
    return slices.cut_samples(training, runtime)


SLICES = Feature(
    name="slices",
    flag="--seq1f1b-slices",
    summary="pipelines in slices (Seq1F1B): a smaller bubble and less memory",
    add_arguments=add_arguments,
    is_on=is_on,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    after_checks=after_checks,
    needs="--seq1f1b-slices of 2 or more",
    borrows=borrowed_flags,
    reads_cost=True,
)
