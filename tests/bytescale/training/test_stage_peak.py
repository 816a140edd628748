"""The memory of each stage of a pipeline equals the forecast: uneven layouts, virtual stages, kept keys.

One process runs the order of work of one stage after another, with the layers of the stage, and its embedding or output
layer. Messages from neighbours are allocated when they arrive.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from bytescale_ext.activation.trace import AllocationTrace
from bytescale_ext.attention.layouts.layout import attention_layout
from bytescale_ext.attention.layouts.slices import slice_layouts
from bytescale_ext.attention.slices import MicroBatchPrefix
from bytescale_ext.parallel.p2p import RingComm
from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.activation.load import LayerSettings, Machine, cost_of_rates, load_of_tokens
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.cost.model_shape import ModelShape, key_value_bytes
from bytescale_ext.plan.memory.held import held_slices
from bytescale_ext.plan.memory.model_states import parameter_bytes, stage_parameters
from bytescale_ext.plan.memory.placement import liveness_bound
from bytescale_ext.plan.memory.stage_memory import LayerBytes
from bytescale_ext.plan.schedule.actions import Action, seq1f1b_schedule
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing
from tests.bytescale.runtimes import runtime_of
from tests.bytescale.training.test_device_peak import FLOAT_BYTES, LOSS_TOKENS, build_fused
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

SHAPE = ModelShape(8, 256, 8, 4, 32, 688, True, 128)
LENGTH = 384  # on each rank
NONE, SWAP = ActivationPlan("none"), ActivationPlan("shares", 1.0, 0.0, 1.0)


@dataclass(frozen=True)
class Case:
    """Pipeline with the layers of each chunk of each stage, and its settings; ``width``: ranks of a document's ring."""

    chunks: tuple[tuple[int, ...], ...]
    plan: ActivationPlan = NONE
    slicing: Slicing = ONE_SLICE
    width: int = 1
    micro_batches: int = 3

    @property
    def num_chunks(self) -> int:
        return len(self.chunks[0])

    def schedule(self) -> Any:
        return seq1f1b_schedule(len(self.chunks), self.micro_batches, self.slicing, self.num_chunks)


UNEVEN, VIRTUAL = ((7,), (1,)), ((2, 2), (2, 2))
CASES = {
    "7 + 1": Case(UNEVEN),
    "7 + 1, swap all": Case(UNEVEN, SWAP),
    "virtual, swap all": Case(VIRTUAL, SWAP, micro_batches=4),
}
KEPT, IN_HOST = Slicing(4, 2 * LENGTH), Slicing(4, 0, swapped_tokens=2 * LENGTH)
RINGS = {
    "sums travel": Case(((3,), (2,)), slicing=replace(KEPT, summed_tokens=0), width=2, micro_batches=2),
    "keys kept, swap all": Case(((6,), (2,)), SWAP, KEPT, width=2, micro_batches=2),
    "keys and all swapped": Case(((6,), (2,)), SWAP, IN_HOST, width=2, micro_batches=2),
}


def cut_of(case: Case) -> Any:
    """Return the slices of each micro-batch, which has one document, and the tokens of each slice on a rank."""
    cost = cost_of_rates(SHAPE, 1e12, 1e12, 1e12)
    length = case.width * LENGTH
    rule = SliceRule(case.slicing, cost.forward + cost.backward)
    micro_batch = MicroBatch((Shard(0, zigzag_ranges(length, case.width, 0), tuple(range(case.width))),))
    return rule, [tokens // case.width for tokens in rule.sequence_slices(length, case.width)], micro_batch


def predicted(case: Case, stage: int) -> float:
    """Return the model states and the forecast of the stage's layers, with the bytes that the model's end keeps."""
    last = len(case.chunks) - 1
    shape, schedule = replace(SHAPE, num_layers=sum(case.chunks[stage])), case.schedule()
    lengths = cut_of(case)[1] if case.slicing.num_slices > 1 else [LENGTH]
    in_flight = -(-schedule.peak_slices(stage) // case.num_chunks)
    keys = key_value_bytes(SHAPE, element_bytes=FLOAT_BYTES)  # as large as their sums, which are float32 too
    slices = ()
    if len(lengths) > 1:
        of_sums = keys if case.slicing.summed_tokens else 0.5 * keys  # only its own half
        others = float(LENGTH * (case.width - 1))
        is_swapped = case.slicing.swapped_tokens > 0
        slices = held_slices(schedule, stage, lengths, others, LayerBytes(0.0, keys, of_sums), is_swapped)
    elif case.num_chunks > 1:
        slices = held_slices(schedule, stage, lengths, 0.0, LayerBytes(0.0, 0.0, 0.0))
    settings = LayerSettings(
        resident_layers=2 if in_flight == 1 else 0, in_flight=in_flight, element_bytes=FLOAT_BYTES,
        loss_tokens=LOSS_TOKENS if stage == last else 0, slices=slices,
    )  # fmt: skip
    load = load_of_tokens(cost_of_rates(shape, 1e12, 1e12, 1e12), max(lengths), 1.0, 1.0, settings)
    return predicted_states(case, stage) + forecast(case.plan, load, Machine(1e12, 1e12)).device_bytes


def predicted_states(case: Case, stage: int) -> float:
    """Return the parameters and gradients of a stage, and the states of its optimizer."""
    shape, ends = replace(SHAPE, num_layers=sum(case.chunks[stage])), (stage == 0, stage == len(case.chunks) - 1)
    return stage_parameters(shape, 1, *ends) * parameter_bytes(FLOAT_BYTES, 1)


def build_stage(case: Case, stage: int, comm: Any) -> list[Any]:
    """Build the chunks of a stage, which share the store of the first chunk."""
    from megatron.core.models.gpt import gpt_model

    original, last, built = gpt_model.GPTModel, len(case.chunks) - 1, []
    for chunk, num_layers in enumerate(case.chunks[stage]):
        first = (stage, chunk) == (0, 0)
        gpt_model.GPTModel = functools.partial(
            original, pre_process=first, post_process=(stage, chunk) == (last, case.num_chunks - 1)
        )
        built.append(build_fused(replace(SHAPE, num_layers=num_layers)))
    gpt_model.GPTModel = original
    store, number = built[0].store, 1
    store._numbers = []
    for one in built:
        for layer in one.model.decoder.layers:
            layer.activations, layer.layer_number = store, number
            store.add_layer(number)
            layer.self_attention.core_attention.runtime.add_parts(comm=comm)
            number += 1
        number += 1  # the layers between are on other stages
    return built


def measure(rank: int, world: int, cases: dict[str, Case]) -> dict[tuple[str, int], int]:
    """Return the peak live bytes of every stage, including model states."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    if torch.distributed.is_initialized():
        parallel_state.initialize_model_parallel()
    comm = RingComm(None, rank, world) if world > 1 else None
    found = {}
    for name, case in cases.items():
        for stage in range(len(case.chunks)):
            run = StageRun(case, stage, rank, comm)
            found[name, stage] = run.step()
    return found


def split_products(layers: Any, runtime: Any) -> None:
    """Defer the weight gradients of these layers to the schedule, like a layer spec with split products."""
    from megatron.bytescale.core.tensor_parallel.weight_gradients import (
        SplitColumnParallelLinear,
        SplitRowParallelLinear,
    )
    from megatron.bytescale.core.transformer.transformer_layer import with_hook_point

    column, row = with_hook_point(SplitColumnParallelLinear), with_hook_point(SplitRowParallelLinear)
    for layer in layers:
        attention, mlp = layer.self_attention, layer.mlp
        kinds = {attention.linear_qkv: column, attention.linear_proj: row, mlp.linear_fc1: column, mlp.linear_fc2: row}
        for linear, kind in kinds.items():
            linear.__class__, linear.runtime, linear.weight.main_grad = kind, runtime, linear.weight.grad


class StageRun:
    """Runs the order of work of one stage on its own layers."""

    def __init__(self, case: Case, stage: int, rank: int, comm: Any) -> None:
        from megatron.bytescale.core.tensor_parallel.weight_gradients import WeightGradients

        self.case, self.stage = case, stage
        self.built = build_stage(case, stage, comm)
        self.store, self.store.plan = self.built[0].store, case.plan
        parameters = [one for built in self.built for one in built.model.parameters()]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.existing = [*parameters, *[parameter.grad for parameter in parameters], self.store.link.arena.memory]
        self.weight_gradients = WeightGradients()
        if case.slicing.zero_bubble:
            runtime = runtime_of()
            runtime.step.weight_gradients = self.weight_gradients
            for built in self.built:
                split_products(built.model.decoder.layers, runtime)
        self.states = parameter_bytes(FLOAT_BYTES, 1) * sum(parameter.numel() for parameter in parameters)
        rule, self.lengths, micro_batch = cut_of(case)
        if len(self.lengths) == 1:
            micro_batch = MicroBatch((Shard(0, ((0, LENGTH),), (0,)),))
            self.layouts: Any = [attention_layout(micro_batch, 0, (LENGTH,), LENGTH)]
        else:
            ring = tuple(range(case.width))
            mine = MicroBatch((Shard(0, zigzag_ranges(case.width * LENGTH, case.width, rank), ring),))
            self.layouts = slice_layouts(rule(mine, (case.width * LENGTH,)), rank, self.lengths)

    def step(self) -> int:
        """Run a step, and return the peak live bytes."""
        from megatron.core.pipeline_parallel.schedules import custom_backward

        from megatron.bytescale.core.pipeline_parallel.seq1f1b import SliceStep

        actions = self.case.schedule().stages[self.stage]
        self.store.begin_step(actions)
        steps = SliceStep(self.case.schedule(), self.stage, training=True, link=self.store.link)
        prefixes = steps.prefixes
        held: dict[Any, tuple[Any, Any]] = {}
        with AllocationTrace(self.existing) as trace:
            for kind, number, index, chunk in actions:
                steps.actions.popleft()
                key = number, index, chunk
                if kind == "F":
                    prefix = prefixes.setdefault((number, chunk), MicroBatchPrefix(swap=steps.swap_of(chunk)))
                    held[key] = self.forward(index, chunk, prefix)
                    continue
                if kind == "W":
                    self.weight_gradients.run(Action("W", *key), is_last=False)
                    continue
                self.weight_gradients.collect(Action("W", *key))
                inputs, output = held.pop(key)
                gradient = torch.ones(self.lengths[index], 1, SHAPE.hidden) if output.dim() else None
                if gradient is None:
                    output.backward()
                else:
                    custom_backward(output, gradient)
                del inputs, output, gradient
        self.store.check_empty()
        return int(self.states) + liveness_bound(trace.requests())

    def forward(self, index: int, chunk: int, prefix: MicroBatchPrefix) -> tuple[Any, Any]:
        """Run a forward pass; return its input, and its output after sending."""
        from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

        from megatron.bytescale.core.packed_seq_params import DocumentSeqParams

        model, tokens = self.built[chunk].model, self.lengths[index]
        self.store.begin_forward()
        positions = torch.arange(tokens)
        is_sliced = len(self.lengths) > 1
        params = DocumentSeqParams(
            positions=positions, layout=self.layouts[index], prefix=prefix if is_sliced else None
        )
        inputs = None
        if not model.pre_process:
            inputs = torch.randn(tokens, 1, SHAPE.hidden).requires_grad_()
            model.set_input_tensor(inputs)
        labels = torch.ones(1, tokens, dtype=torch.long) if model.post_process else None
        ids = torch.ones(1, tokens, dtype=torch.long)
        output = model(ids, positions[None], None, labels=labels, packed_seq_params=params)
        if model.post_process:
            return inputs, output.float().sum()
        deallocate_output_tensor(output, True)
        return inputs, output


def check(found: dict[tuple[str, int], int], cases: dict[str, Case]) -> None:
    assert len(found) == sum(len(case.chunks) for case in cases.values())
    for (name, stage), live in found.items():
        assert predicted(cases[name], stage) == pytest.approx(live, rel=0.05), (name, stage)


@pytest.mark.full
def test_every_stage_takes_what_is_predicted() -> None:
    check(run_ranks(measure, 1, CASES, init_group=False)[0], CASES)


@pytest.mark.full
def test_every_stage_takes_what_is_predicted_where_rings_keep_keys() -> None:
    kept, swapped = "keys kept, swap all", "keys and all swapped"
    for found in run_ranks(measure, 2, RINGS):
        check(found, RINGS)
        freed = predicted(RINGS[kept], 0) - predicted(RINGS[swapped], 0)
        assert found[kept, 0] - found[swapped, 0] == pytest.approx(freed, rel=0.2)
        assert freed > 0.1 * (found[kept, 0] - predicted_states(RINGS[kept], 0))  # bytes of activations and keys


SPLIT = {name: Case(((2,), (2,)), slicing=Slicing(zero_bubble=on)) for name, on in (("whole", False), ("split", True))}


def test_stages_with_zero_bubble_hold_what_the_first_stage_holds_without() -> None:
    """Inputs of products and gradients of their outputs take about as many bytes as the saved tensors of the layers."""
    found = run_ranks(measure, 1, SPLIT, init_group=False)[0]
    states = [predicted_states(SPLIT["whole"], stage) for stage in (0, 1)]
    whole, split = ([found[name, stage] - states[stage] for stage in (0, 1)] for name in ("whole", "split"))
    assert split[0] <= 1.05 * whole[0]
    assert whole[1] < 0.8 * split[1]
    assert split[1] <= 1.05 * whole[0]
