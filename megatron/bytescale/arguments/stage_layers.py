"""How each pipeline stage runs its layers: what it holds of micro-batches and slices, and resident layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.memory.activations import SlicedStages
from bytescale_ext.config.planner import slicing as slicing_of
from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.slices import DocumentSliceConfig, SliceConfig
from bytescale_ext.plan.activation.load import RESIDENT_LAYERS, HeldSlices, LayerSettings
from bytescale_ext.plan.activation.tensors import EXPERT_LOAD
from bytescale_ext.plan.evaluate.policy_choice import policy_slicings
from bytescale_ext.plan.memory.held import MANY_GROUPS, held_slices
from bytescale_ext.plan.memory.stage_memory import LayerBytes, head_bytes
from bytescale_ext.plan.schedule.actions import most_slices, seq1f1b_schedule, slice_group_size
from megatron.bytescale.arguments.operators import operators_of
from megatron.bytescale.core.transformer.moe.expert_ranks import ranks_that_share_experts


def sliced_options(args: Any, run: RunConfig, documents: DocumentSliceConfig) -> tuple[SlicedStages, ...]:
    """Return the slicings from which the planner chooses under a policy, each with the layers of all stages."""
    assert documents.choice is not None, f"{documents=}"
    found = []
    for slicing in policy_slicings(documents.choice.options, args.seq_length):
        of_option = run.with_feature("slices", replace(documents, rule=replace(documents.rule, slicing=slicing)))
        stages = tuple(stage_settings(args, of_option, stage) for stage in range(len(run.stage_layers)))
        found.append(SlicedStages(slicing, slice_lengths(of_option), stages))
    return tuple(found)


def stage_settings(args: Any, run: RunConfig, stage: int) -> LayerSettings:
    """Return how a pipeline stage runs its layers, and how many micro-batches or slices it holds at once."""
    virtual, how = args.virtual_pipeline_model_parallel_size or 1, layer_settings(args, run)
    slices, num_stages = slicing_of(run), len(run.stage_layers)
    in_flight = most_slices(num_stages, slices, stage, virtual)
    if run.find(HdpConfig) is None:  # plans of documents may have any number of micro-batches
        micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
        in_flight = min(in_flight, micro_batches * slices.num_slices)
    held = _held_slices(args, run, stage) if slices.num_slices > 1 or virtual > 1 else ()
    return replace(
        how,
        num_layers=run.stage_layers[stage],
        resident_layers=RESIDENT_LAYERS if in_flight == 1 else 0,
        in_flight=in_flight,
        loss_tokens=how.loss_tokens if stage == num_stages - 1 else 0,
        slices=held,
        expert_load=expert_load(args),
        expert_ranks=ranks_that_share_experts(args),
        virtual=virtual > 1,
    )


def layer_settings(args: Any, run: RunConfig) -> LayerSettings:
    """Return what the layers of all stages have in common, with the tokens of a loss, which only the last one runs."""
    element = args.params_dtype.itemsize
    return LayerSettings(
        element_bytes=element,
        sequence_parallel=args.sequence_parallel,
        operators=operators_of(args, run.process.on_cuda, element),
        loss_tokens=args.chunked_cross_entropy,
    )


def expert_load(args: Any) -> float:
    """Return how many times the tokens of an even spread the experts of a rank are expected to get at most.

    Without expert parallelism every token stays on its rank.
    """
    return EXPERT_LOAD if ranks_that_share_experts(args) > 1 else 1.0


def _held_slices(args: Any, run: RunConfig, stage: int) -> tuple[HeldSlices, ...]:
    """Return what a stage holds at most: of micro-batches that are full, and of the longest document that is kept.

    Where keys are swapped, also of the longest document with keys in host memory.
    """
    documents, slices, slicing = run.find(DocumentSliceConfig), slice_lengths(run), slicing_of(run)
    num_stages, virtual = len(run.stage_layers), args.virtual_pipeline_model_parallel_size or 1
    count = MANY_GROUPS * max(num_stages, slice_group_size(num_stages, len(slices)) // len(slices))
    if run.find(HdpConfig) is None:
        count = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
        count = count if len(slices) > 1 else -(-count // num_stages) * num_stages  # whole groups hold as much
    others = 0.0 if documents is None else 1 - 1 / run.cluster.num_ranks
    schedule = seq1f1b_schedule(num_stages, count, slicing, virtual)
    if len(slices) == 1:  # a micro-batch holds its keys as activations
        return held_slices(schedule, stage, [run.cluster.tokens_per_rank], 0.0, LayerBytes(0.0, 0.0, 0.0))
    lengths = [run.cluster.tokens_per_rank * tokens / sum(slices) for tokens in slices]
    sizes = run.shape, run.process.tensor_parallel, args.params_dtype.itemsize
    layer = LayerBytes.of(*sizes)
    if stage == num_stages - 1:
        how = layer_settings(args, run)
        layer = replace(layer, head=head_bytes(*sizes, how.loss_tokens is not None, how.operators))
    on_device, in_host = (min(most, args.seq_length) for most in (slicing.kept_tokens, slicing.swapped_tokens))
    found = held_slices(schedule, stage, lengths, on_device * others, layer)
    if in_host > on_device:
        found += held_slices(schedule, stage, lengths, in_host * others, layer, is_swapped=True)
    return found


def slice_lengths(run: RunConfig) -> tuple[int, ...]:
    """Return the tokens of the slices of a sample or of the longest document; a single one without slices."""
    samples, documents = run.find(SliceConfig), run.find(DocumentSliceConfig)
    if samples is not None:
        return samples.lengths
    if documents is None:
        return (1,)
    longest = run.get(HdpConfig).longest_sequence
    return documents.rule.sequence_slices(longest, -(-longest // run.cluster.tokens_per_rank))
