"""Pipelines in slices (Seq1F1B, Sun et al. 2024): slices of a micro-batch pass through the stages one by one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.slices import DocumentSliceConfig, SliceConfig
from bytescale_ext.plan.cost.model_shape import key_value_bytes
from bytescale_ext.plan.evaluate.slicing_choice import OPTIONS
from bytescale_ext.plan.schedule.check_slices import check_slices
from bytescale_ext.plan.schedule.document_slices import kept_bytes
from bytescale_ext.plan.schedule.slices import PARTITIONS, layer_cost, parse_partition, slice_lengths
from bytescale_ext.plan.setup.choose import Decision
from bytescale_ext.plan.setup.layers import slice_rule
from bytescale_ext.plan.setup.setup import AUTO, Setup
from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale.arguments.conditions import IS_CUT, given
from megatron.bytescale.arguments.options import NO_OVERRIDES, Overrides
from megatron.bytescale.features.feature import Feature
from megatron.bytescale.features.slices.refusals import REFUSALS

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


ORDER_FLAG: Final = "--seq1f1b-eager"
ZERO_BUBBLE_FLAG: Final = "--seq1f1b-zero-bubble"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Seq1F1B."""
    group = parser.add_argument_group("bytescale: pipelines in slices (Seq1F1B)")
    group.add_argument(
        "--seq1f1b-slices",
        type=slices_value,
        metavar="K",
        help="Divide each micro-batch into K slices that pass through the pipeline one after another. Default: 1, "
        f"whole micro-batches. {AUTO} (with --hybrid-data-parallel): the planner chooses slices, order and kept keys "
        "for each step within --device-memory-gb.",
    )
    group.add_argument(
        "--seq1f1b-partition",
        metavar="NAME",
        help="Quantity that is equal in all slices: time (default), flops, or tokens (even); or tokens as L1,...,LK. "
        "`bytescale schedule` shows the lengths for each.",
    )
    group.add_argument(
        ORDER_FLAG,
        action="store_true",
        help="Each stage runs two forwards ahead of the next stage instead of one, so that slices of different "
        "duration wait less for each other. Faster, but needs activation memory for up to (stages - 1) / K more "
        "micro-batches.",
    )
    group.add_argument(
        "--hdp-kept-keys",
        type=int,
        metavar="TOKENS",
        help="With --hybrid-data-parallel: each rank keeps the keys that it receives for documents of up to TOKENS "
        "tokens, so that they are sent once instead of again for each slice. Default: as many as fit in the memory "
        "that 1F1B would need. 0: none.",
    )
    group.add_argument(
        "--hdp-swapped-keys",
        type=int,
        metavar="TOKENS",
        help="With --hybrid-data-parallel: keep the keys of documents longer than --hdp-kept-keys and up to TOKENS "
        "tokens in host memory (--host-memory-gb). Each slice reads the keys of earlier slices from there. Default: 0, "
        f"none. With --seq1f1b-slices {AUTO} and --host-memory-gb the planner chooses.",
    )


def slices_value(text: str) -> int | str:
    """Parse the value of ``--seq1f1b-slices``. Raises ValueError for a text that is neither a number nor "auto"."""
    return text if text == AUTO else int(text)


@dataclass(frozen=True)
class SliceFlags:
    """Flags of slices, and the flags of memory and of Megatron that they depend on; None: not given.

    Attributes:
        seq1f1b_slices: slices of a micro-batch, or "auto".
        seq1f1b_partition: quantity that is equal in all slices, or the tokens of each slice.
        seq1f1b_eager: whether stages run two forwards ahead of the next stage.
        seq1f1b_zero_bubble: whether weight gradients fill the idle time of stages.
        hdp_kept_keys, hdp_swapped_keys: longest documents whose keys are kept, on the device and in host memory.
        hybrid_data_parallel: whether documents are planned.
        device_memory_gb, host_memory_gb: memory of the device, and host memory of a process.
        pipeline_model_parallel_size: pipeline stages.
        num_layers_per_virtual_pipeline_stage, num_virtual_stages_per_pipeline_rank: virtual stages.
        overlap_p2p_comm: whether Megatron overlaps messages with computation.
        step_batch_size_schedule: schedule of growing steps.
        micro_batch_size, eval_micro_batch_size: samples of a micro-batch.
        eval_global_batch_size, eval_iters: samples of an evaluation step, and steps of an evaluation.
        data_parallel_size: ranks with different micro-batches; Megatron's checks set it.
    """

    seq1f1b_slices: int | str | None
    seq1f1b_partition: str | None
    seq1f1b_eager: bool
    seq1f1b_zero_bubble: bool
    hdp_kept_keys: int | None
    hdp_swapped_keys: int | None
    hybrid_data_parallel: bool
    device_memory_gb: float | None
    host_memory_gb: float | None
    pipeline_model_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    overlap_p2p_comm: bool = False
    step_batch_size_schedule: str | None = None
    micro_batch_size: int = 1
    eval_micro_batch_size: int | None = None
    eval_global_batch_size: int | None = None
    eval_iters: int | None = None
    data_parallel_size: int = 1


def before_checks(flags: SliceFlags) -> Overrides:
    """Check the flags of slices, and return the Megatron arguments that slices need."""
    num_slices = 1 if flags.seq1f1b_slices is None else flags.seq1f1b_slices
    if isinstance(num_slices, str):
        _check_auto(flags)
    elif num_slices < 1:
        raise ValueError(f"--seq1f1b-slices {num_slices} must be at least 1, which means whole micro-batches")
    for flag, tokens in (("--hdp-kept-keys", flags.hdp_kept_keys), ("--hdp-swapped-keys", flags.hdp_swapped_keys)):
        if tokens is not None and not flags.hybrid_data_parallel:
            raise ValueError(f"{flag} needs --hybrid-data-parallel")
        if tokens is not None and tokens < 0:
            raise ValueError(f"{flag} must be at least 0, got {tokens}")
    if flags.hdp_swapped_keys and num_slices == 1:
        raise ValueError("--hdp-swapped-keys needs --seq1f1b-slices of 2 or more")
    if flags.hdp_swapped_keys and not flags.host_memory_gb:
        raise ValueError("--hdp-swapped-keys needs --host-memory-gb, the host memory of each process for keys")
    if num_slices == AUTO or flags.seq1f1b_eager:
        _check_order(flags)
    # A mask covers a whole sequence; slices need no mask.
    return {"seq1f1b_slices": num_slices, "create_attention_mask_in_dataloader": False}


def after_checks(flags: SliceFlags) -> Overrides:
    """Overlap messages in warm-up and flush too, if Megatron overlaps messages because of virtual stages."""
    return {"overlap_p2p_comm_warmup_flush": True} if flags.overlap_p2p_comm else NO_OVERRIDES


@dataclass(frozen=True, slots=True)
class SliceOptions:
    """The flags of slices.

    Attributes:
        slices: slices of a micro-batch; "auto": the planner chooses.
        ahead: whether stages run two forwards ahead of the next stage.
        zero_bubble: whether weight gradients fill the idle time of stages.
        partition: quantity that is equal in all slices, or the tokens of each slice.
        kept_keys, swapped_keys: longest documents whose keys are kept, on the device and in host memory, or None.
    """

    slices: int | str = 1
    ahead: bool = False
    zero_bubble: bool = False
    partition: str | tuple[int, ...] = "time"
    kept_keys: int | None = None
    swapped_keys: int | None = None

    @property
    def is_on(self) -> bool:
        """Whether our schedule is used: micro-batches run in slices, or backward passes are split."""
        return self.slices != 1 or self.zero_bubble

    @property
    def slicing(self) -> Slicing:
        """The slices, including swapped but not kept keys; for "auto" the largest option."""
        if isinstance(self.slices, str):
            return OPTIONS[-1]
        return Slicing(
            self.slices, eager=self.ahead, zero_bubble=self.zero_bubble, swapped_tokens=self.swapped_keys or 0
        )


def slice_options(flags: SliceFlags) -> SliceOptions:
    """Return the options of slices. Raises ValueError for a partition that samples or documents do not support."""
    partition = parse_partition(flags.seq1f1b_partition or "time")
    if flags.hybrid_data_parallel and not isinstance(partition, str):
        raise ValueError(
            f"--seq1f1b-partition {flags.seq1f1b_partition} does not work with --hybrid-data-parallel, whose "
            f"micro-batches differ in length: use {', '.join(PARTITIONS)}"
        )
    return SliceOptions(
        slices=flags.seq1f1b_slices or 1,
        ahead=flags.seq1f1b_eager,
        zero_bubble=flags.seq1f1b_zero_bubble,
        partition=partition,
        kept_keys=flags.hdp_kept_keys,
        swapped_keys=flags.hdp_swapped_keys,
    )


def flags_of(slicing: Slicing) -> list[str]:
    """Return the command-line flags for ``slicing``."""
    flags = ((ORDER_FLAG, slicing.eager), (ZERO_BUBBLE_FLAG, slicing.zero_bubble))
    return ["--seq1f1b-slices", str(slicing.num_slices), *(flag for flag, is_on in flags if is_on)]


def _check_auto(flags: SliceFlags) -> None:
    """Raise ValueError for flags that prevent the planner from choosing the slices of each step."""
    auto, by_hand = f"--seq1f1b-slices {AUTO}", "or give a number of slices"
    if not flags.hybrid_data_parallel:
        raise ValueError(f"{auto} needs --hybrid-data-parallel, whose planner chooses them; {by_hand}")
    if flags.device_memory_gb is None:
        raise ValueError(f"{auto} needs --device-memory-gb, the memory of the device; {by_hand}")
    if not flags.device_memory_gb > 0:
        raise ValueError(f"--device-memory-gb {flags.device_memory_gb:g} is not an amount of memory")
    chosen = {
        "--hdp-kept-keys": flags.hdp_kept_keys,
        "--hdp-swapped-keys": flags.hdp_swapped_keys,
        ORDER_FLAG: flags.seq1f1b_eager or None,
    }
    for flag, value in chosen.items():
        if value is not None:
            raise ValueError(f"{auto} chooses the value of {flag}: remove {flag}, {by_hand}")


def _check_order(flags: SliceFlags) -> None:
    flag = "--seq1f1b-slices auto" if flags.seq1f1b_slices == AUTO else ORDER_FLAG
    if flags.pipeline_model_parallel_size == 1:
        raise ValueError(f"{flag} needs a --pipeline-model-parallel-size of 2 or more")
    if flags.num_layers_per_virtual_pipeline_stage or flags.num_virtual_stages_per_pipeline_rank:
        raise ValueError(f"{flag} does not work with virtual stages, which run two forwards ahead anyway")


def resolve(flags: SliceFlags, run: RunConfig) -> SliceConfig | DocumentSliceConfig:
    """Return the slices of fixed-length samples, or of documents under hybrid data parallelism."""
    if run.decision.setup.sequences.are_documents:
        return document_slices(run.decision)
    return sample_slices(flags, run.decision.setup)


def sample_slice_lengths(setup: Setup, options: SliceOptions) -> tuple[int, ...]:
    """Return the tokens of each slice of a fixed-length sample. Raises ValueError for slices that do not fit."""
    partition, longest = options.partition, setup.sequences.longest
    num_slices = options.slicing.num_slices
    measured = setup.cost if setup.measured else None
    cost = layer_cost(setup.shape, partition, measured).both if isinstance(partition, str) else None
    row_shares = setup.mesh.tensor_parallel if setup.mesh.sequence_parallel else 1
    lengths = slice_lengths(longest, num_slices, partition, cost, row_shares)
    check_slices(lengths, longest, num_slices, row_shares)
    return lengths


def sample_slices(flags: SliceFlags, setup: Setup) -> SliceConfig:
    """Return the slices of fixed-length samples.

    Raises:
        ValueError: groups of virtual stages do not fit; the message gives the nearest fitting numbers.
    """
    mesh = setup.mesh
    if mesh.virtual_stages > 1 and flags.step_batch_size_schedule:
        raise ValueError(
            "--seq1f1b-slices with virtual stages does not work with --step-batch-size-schedule: remove one of them"
        )
    row_shares = mesh.tensor_parallel if mesh.sequence_parallel else 1
    lengths = setup.sequences.sample_slices
    config = SliceConfig(setup.given_slicing, lengths, mesh.num_stages, mesh.virtual_stages, row_shares)
    if not flags.step_batch_size_schedule:
        config.schedule(setup.sequences.micro_batches)
    if flags.eval_iters and flags.eval_global_batch_size:
        samples = (flags.eval_micro_batch_size or flags.micro_batch_size) * flags.data_parallel_size
        config.schedule(flags.eval_global_batch_size // samples)
    return config


def document_slices(decision: Decision) -> DocumentSliceConfig:
    """Return the slices of micro-batches of documents."""
    setup = decision.setup
    num_stages, rule = setup.mesh.num_stages, slice_rule(setup, decision.finest)
    host_bytes = setup.budget.host_bytes if setup.swaps_keys else 0.0
    if setup.chooses_slices:
        device_gb = setup.budget.device_bytes / 1e9
        note = f"each step runs in the fastest slices within {device_gb:g} GB of device memory"
        return DocumentSliceConfig(rule, num_stages, note, is_chosen=True, host_bytes=host_bytes)
    config = DocumentSliceConfig(rule, num_stages, host_bytes=host_bytes)
    if rule.slicing.num_slices == 1:
        return config
    key_bytes = key_value_bytes(setup.shape, setup.mesh.tensor_parallel)
    of_stages = [key_bytes * layers for layers in setup.mesh.stage_layers]
    return config.with_note(kept_note(config, setup.sequences.longest, of_stages))


def kept_note(config: DocumentSliceConfig, longest: int, key_bytes: Sequence[float]) -> str:
    """Return the message about keys that are kept between slices.

    Args:
        config: slices of documents.
        longest: tokens of the longest sequence.
        key_bytes: bytes of a token's keys and values in all layers of a stage, for each stage.
    """
    slicing, num_stages = config.slicing, config.num_stages
    note = f"keys of documents of up to {slicing.kept_tokens:,} tokens are kept from slice to slice"
    if slicing.longest_kept > slicing.kept_tokens:
        note += f", and up to {slicing.swapped_tokens:,} tokens in host memory"
    if slicing.longest_kept >= longest or num_stages == 1:
        return note
    num_bytes = max(
        kept_bytes(num_stages, config.slicing, longest, each, stage) for stage, each in enumerate(key_bytes)
    )
    return (
        f"{note}. Longer documents send their keys again with each slice, which may cost more time than slices save: "
        f"--hdp-kept-keys {longest} avoids that with up to {num_bytes / 1e9:,.1f} GB of keys on a rank; "
        "or use fewer slices (`bytescale simulate` compares them)"
    )


def borrowed_flags(flags: SliceFlags) -> tuple[str, ...]:
    """Return the flags of activation policies that slices read: memory, and the link for swapped keys."""
    link = ("--host-memory-gb", "--link-gb-per-second")
    is_chosen = flags.seq1f1b_slices == AUTO
    return (*("--device-memory-gb",) * is_chosen, *(link if is_chosen or flags.hdp_swapped_keys else ()))


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
    is_on=IS_CUT | given("seq1f1b_zero_bubble"),
    options=SliceFlags,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    after_checks=after_checks,
    needs="--seq1f1b-slices of 2 or more",
    borrows=borrowed_flags,
    reads_cost=True,
    refusals=REFUSALS,
)
