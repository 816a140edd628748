"""Layer settings of each pipeline stage: micro-batches and slices in memory, and resident layers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from bytescale_ext.plan.activation.load import RESIDENT_LAYERS, HeldSlices, LayerLoad, LayerSettings, full_load
from bytescale_ext.plan.activation.tensors import EXPERT_LOAD
from bytescale_ext.plan.memory.held import MANY_GROUPS, held_slices
from bytescale_ext.plan.memory.stage_memory import LayerBytes, head_bytes
from bytescale_ext.plan.schedule.actions import SliceSchedule, most_slices, seq1f1b_schedule, slice_group_size
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.setup.costs import equal_cost
from bytescale_ext.plan.setup.setup import Setup
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing


def stage_settings(setup: Setup, stage: int, slicing: Slicing) -> LayerSettings:
    """Return the layer settings of a pipeline stage for full micro-batches in these slices."""
    mesh, numerics = setup.mesh, setup.numerics
    in_flight = most_slices(mesh.num_stages, slicing, stage, mesh.virtual_stages)
    if not setup.sequences.are_documents:  # plans of documents may have any number of micro-batches
        in_flight = min(in_flight, setup.sequences.micro_batches * slicing.num_slices)
    return LayerSettings(
        num_layers=mesh.stage_layers[stage],
        resident_layers=RESIDENT_LAYERS if in_flight == 1 else 0,
        in_flight=in_flight,
        element_bytes=numerics.element_bytes,
        sequence_parallel=mesh.sequence_parallel,
        operators=numerics.operators,
        loss_tokens=numerics.loss_tokens if stage == mesh.last_stage else 0,
        slices=_held_slices(setup, stage, slicing) if slicing.num_slices > 1 or mesh.virtual_stages > 1 else (),
        expert_load=expert_load(setup, slicing),
        expert_ranks=mesh.expert_ranks,
        virtual=mesh.virtual_stages > 1,
        later_layers=setup.shape.later_layers if stage == mesh.last_stage else 0,
        received=mesh.virtual_stages - (stage == 0),
    )


def stage_load(setup: Setup, stage: int, slicing: Slicing) -> LayerLoad:
    """Return the largest micro-batch of a stage, or its largest slice."""
    settings, lengths = stage_settings(setup, stage, slicing), setup_slice_lengths(setup, slicing)
    return full_load(setup.cost, setup.cluster.tokens_per_rank, setup.sequences.longest, settings, lengths)


def expert_load(setup: Setup, slicing: Slicing = ONE_SLICE) -> float:
    """Return the largest expected number of rows of a rank's experts, relative to an even spread of tokens.

    Without expert parallelism every token stays on its rank. FP8 pads the rows of each expert in each slice.
    """
    mesh = setup.mesh
    load = EXPERT_LOAD if mesh.expert_ranks > 1 else 1.0
    if not setup.expert_padding:
        return load
    ranks_per_expert = (mesh.expert_tensor_parallel or mesh.tensor_parallel) / mesh.tensor_parallel
    rows = setup.cluster.tokens_per_rank * setup.shape.experts_per_token * ranks_per_expert
    return load + setup.expert_padding * slicing.num_slices / rows


def setup_slice_lengths(setup: Setup, slicing: Slicing) -> tuple[int, ...]:
    """Return the tokens of the slices of a sample or of the longest document; (1,) without slices."""
    if setup.sequences.sample_slices:
        return setup.sequences.sample_slices
    if slicing.num_slices == 1:
        return (1,)
    longest = setup.sequences.longest
    return slice_rule(setup, slicing).sequence_slices(longest, -(-longest // setup.cluster.tokens_per_rank))


def slice_rule(setup: Setup, slicing: Slicing) -> SliceRule:
    """Return the rule that divides micro-batches of documents into slices."""
    return SliceRule(slicing, equal_cost(setup), setup.rows_multiple)


def _held_slices(setup: Setup, stage: int, slicing: Slicing) -> tuple[HeldSlices, ...]:
    """Return the peak content of a stage: full micro-batches, and the keys of the longest document with kept keys.

    If keys are swapped, the longest document with keys in host memory counts too.
    """
    mesh, tokens, lengths = setup.mesh, setup.cluster.tokens_per_rank, setup_slice_lengths(setup, slicing)
    num_stages, num_slices = mesh.num_stages, len(lengths)
    count = MANY_GROUPS * max(num_stages, slice_group_size(num_stages, num_slices) // num_slices)
    if not setup.sequences.are_documents:
        count = setup.sequences.micro_batches
        count = count if num_slices > 1 else -(-count // num_stages) * num_stages  # whole groups have the same peak
    order = num_stages, count, slicing.order_of_work(), mesh.virtual_stages
    if num_slices == 1:  # the keys of a whole micro-batch count as activations
        return _held(order, stage, (float(tokens),), 0.0, LayerBytes(0.0, 0.0, 0.0))
    sizes = setup.shape, mesh.tensor_parallel, setup.numerics.element_bytes
    layer = LayerBytes.of(*sizes)
    if stage == mesh.last_stage:
        is_chunked = setup.numerics.loss_tokens is not None
        layer = replace(layer, head=head_bytes(*sizes, is_chunked, setup.numerics.operators))
    of_slices = tuple(tokens * length / sum(lengths) for length in lengths)
    of_others = 1 - 1 / setup.cluster.num_ranks if setup.sequences.are_documents else 0.0
    longest = setup.sequences.longest
    on_device, in_host = (min(most, longest) for most in (slicing.kept_tokens, slicing.swapped_tokens))
    held = _held(order, stage, of_slices, on_device * of_others, layer)
    if in_host > on_device:
        held += _held(order, stage, of_slices, in_host * of_others, layer, is_swapped=True)
    return held


@lru_cache(maxsize=4096)
def _held(
    order: tuple[int, int, Slicing, int],
    stage: int,
    lengths: tuple[float, ...],
    kept_tokens: float,
    layer: LayerBytes,
    is_swapped: bool = False,
) -> tuple[HeldSlices, ...]:
    """Return ``held_slices`` of a ``_schedule``. Cached for all setups with the same order of work."""
    return held_slices(_schedule(*order), stage, lengths, kept_tokens, layer, is_swapped)


@lru_cache(maxsize=64)
def _schedule(num_stages: int, num_micro_batches: int, slicing: Slicing, virtual_stages: int) -> SliceSchedule:
    """Return the order of work of the stages. It does not depend on kept keys."""
    return seq1f1b_schedule(num_stages, num_micro_batches, slicing, virtual_stages)
