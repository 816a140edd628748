"""The memory of a pipeline stage that runs slices is the one that is predicted: activations, keys and gradient sums.

The first stage's order of work runs on one process, whose model stands for the layers of the stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bytescale_ext.activation.trace import AllocationTrace
from bytescale_ext.attention.layouts.slices import sample_layouts
from bytescale_ext.attention.slices import MicroBatchPrefix
from bytescale_ext.plan.activation.tensors import layer_tensors
from bytescale_ext.plan.cost.model_shape import key_value_bytes
from bytescale_ext.plan.memory.placement import liveness_bound
from bytescale_ext.plan.schedule.actions import seq1f1b_schedule
from bytescale_ext.plan.schedule.simulate import peak_held
from bytescale_ext.plan.schedule.slices import slice_ranges
from bytescale_ext.plan.step.sizes import Slicing
from tests.bytescale.training.test_device_peak import FLOAT_BYTES, LOSS_TOKENS, SHAPE, build_fused
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

STAGES, MICRO_BATCHES, LENGTH = 3, 3, 768
LENGTHS = {2: (448, 320), 4: (256, 192, 192, 128)}
GROUPED = replace(SHAPE, num_layers=3)
SHAPES = {"grouped": GROUPED, "multi-head": replace(GROUPED, num_kv_heads=SHAPE.num_heads)}


def predicted(kv_heads: str, slicing: Slicing, lengths: tuple[int, ...]) -> float:
    """Activations of the slices in flight, sums of key gradients, and gradients of the running layer.

    The model ends with a norm and the loss in chunks, which keep a hidden state each.
    """
    shape = SHAPES[kv_heads]
    tensors = [one.bytes_per_token for one in layer_tensors(shape, FLOAT_BYTES)]
    keys = key_value_bytes(shape, element_bytes=FLOAT_BYTES)  # as large as their sums, which are float32 too
    schedule = seq1f1b_schedule(STAGES, MICRO_BATCHES, slicing)
    held = peak_held(schedule, 0, [n * sum(tensors) for n in lengths], [n * keys for n in lengths])
    ends = peak_held(schedule, 0, [2.0 * n * tensors[0] for n in lengths])
    return shape.num_layers * held + ends + max(lengths) * (max(tensors) + 2 * tensors[0])


def measure(rank: int, world: int, kv_heads: str) -> dict[tuple[int, bool], int]:
    """Return the most live bytes of the first stage's step, by number of slices and order."""
    from megatron.bytescale.core.packed_seq_params import DocumentSeqParams

    built = build_fused(SHAPES[kv_heads])
    parameters = list(built.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    existing = [*parameters, *[parameter.grad for parameter in parameters]]
    tokens = built.batch(LENGTH, 0)

    def forward(index: int, lengths: tuple[int, ...], prefix: MicroBatchPrefix) -> torch.Tensor:
        part, layout = slice_ranges(lengths)[index], sample_layouts(lengths, 1)[index]
        positions = torch.arange(part.start, part.stop)
        params = DocumentSeqParams(positions=positions, layout=layout, prefix=prefix)
        labels = tokens[None, part.start + 1 : part.stop + 1]
        inputs = tokens[None, part.start : part.stop]
        losses = built.model(inputs, positions[None], None, labels=labels, packed_seq_params=params)
        return losses.float().sum()

    def run(slicing: Slicing, lengths: tuple[int, ...]) -> int:
        prefixes: dict[int, MicroBatchPrefix] = {}
        outputs: dict[tuple[int, int], Any] = {}
        with AllocationTrace(existing) as trace:
            for kind, number, index, _ in seq1f1b_schedule(STAGES, MICRO_BATCHES, slicing).stages[0]:
                if kind == "F":
                    prefix = prefixes.setdefault(number, MicroBatchPrefix())
                    outputs[number, index] = forward(index, lengths, prefix)
                else:
                    outputs.pop((number, index)).backward()
        assert not any(layer.keys or layer.sums for prefix in prefixes.values() for layer in prefix.layers.values())
        return liveness_bound(trace.requests())

    run(Slicing(2), LENGTHS[2])  # the first run makes what stays, as the angles of positions
    cases = ((2, False), (4, False), (4, True))
    return {(count, eager): run(Slicing(count, eager=eager), LENGTHS[count]) for count, eager in cases}


@pytest.mark.parametrize("kv_heads", SHAPES)
def test_live_bytes_of_slices_are_within_five_percent_of_the_prediction(kv_heads: str) -> None:
    found = run_ranks(measure, 1, kv_heads, init_group=False)[0]
    assert len(found) == 3
    assert LOSS_TOKENS < min(LENGTHS[4])  # logits never set the peak
    for (count, eager), live in found.items():
        expected = predicted(kv_heads, Slicing(count, eager=eager), LENGTHS[count])
        assert expected == pytest.approx(live, rel=0.05), (count, eager, expected / live)
