"""Order of work of a stage: layers that are read ahead, and every layer of a pipeline is read before its use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from bytescale_ext.activation.order import WorkOrder
from bytescale_ext.activation.record import LayerRecord
from bytescale_ext.activation.store import ActivationStore
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.schedule.actions import Action, SliceSchedule, seq1f1b_schedule
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing
from tests.activation.test_run import assert_equal, inputs_of, make_store
from tests.activation.toy_layer import ToyLayer
from tests.sample import sampled

TWO_STAGES = """
num_stages 2 num_micro_batches 2 num_slices 2 num_chunks 1 group_size 1 eager 0 zero_bubble 0
stage 0   F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0
stage 1   F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0
"""
SCHEDULES = {
    "one stage, slices": seq1f1b_schedule(1, 2, Slicing(3)),
    "1F1B": seq1f1b_schedule(4, 6),
    "few micro-batches": seq1f1b_schedule(4, 2),
    "slices": seq1f1b_schedule(3, 3, Slicing(2)),
    "eager slices": seq1f1b_schedule(3, 3, Slicing(4, eager=True)),
    "virtual stages": seq1f1b_schedule(2, 4, ONE_SLICE, 2, 2),
    "slices of virtual stages": seq1f1b_schedule(3, 4, Slicing(2), 2),
}
PLANS = {
    "memo": ActivationPlan("memo", 0.4, 0.6, 1.0),
    "priced": ActivationPlan("priced", 0.25, 0.5, 0.5, True),
    "resident": ActivationPlan("priced", 0.5, 0.25, 1.0, True, 1),
}


def unit(text: str) -> Action:
    micro_batch, slice_index = text.split(".")
    return Action("F", int(micro_batch), int(slice_index))


def test_a_forward_pass_too_many_is_an_error() -> None:
    order = WorkOrder(seq1f1b_schedule(2, 1).stages[0])
    assert order.running is None
    order.begin_forward()
    with pytest.raises(AssertionError, match="more forward passes"):
        order.begin_forward()


def run_stage(store: ActivationStore | None, actions: tuple[Action, ...], num_layers: int) -> list[torch.Tensor]:
    """Run a stage of toy layers in this order; return outputs, and the gradients of inputs and weights.

    Layers of different chunks are not numbered consecutively, as on a stage with other stages between its chunks.
    """
    torch.manual_seed(0)
    chunks: dict[int, list[ToyLayer]] = {}
    for chunk in sorted({action.chunk for action in actions}):
        numbers = range(10 * chunk + 1, 10 * chunk + 1 + num_layers)
        chunks[chunk] = [ToyLayer(number, store) for number in numbers]
    runs: dict[Action, tuple[torch.Tensor, torch.Tensor]] = {}
    found = []
    if store is not None:
        store.begin_step(actions)
    for action in actions:
        if action.kind == "B":
            given, out = runs.pop(action._replace(kind="F"))
            out.square().sum().backward()
            found += [out.detach(), given.grad]
            continue
        if store is not None:
            store.begin_forward()
        given = out = inputs_of(40, seed=hash(action[1:]) % 1000)
        for layer in chunks[action.chunk]:
            out = layer(out)
        runs[action] = given, out
    return [*found, *(p.grad for layers in chunks.values() for one in layers for p in one.parameters())]


def cases() -> Iterator[tuple[str, int, int, str]]:
    """Yield each schedule with one plan, and the last schedule with all plans."""
    for number, (name, schedule) in enumerate(SCHEDULES.items()):
        plans = list(PLANS) if number == len(SCHEDULES) - 1 else [list(PLANS)[number % len(PLANS)]]
        for stage, plan in itertools.product(range(schedule.num_stages), plans):
            yield name, stage, 1 if stage % 2 else 3, plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "num_layers", "plan"), sampled(cases(), [case for case in cases() if case[1] < 2])
)
def test_no_layer_is_read_late(
    name: str, stage: int, num_layers: int, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads begin before each layer's backward pass, at most two layers are on the device, and results are equal."""
    schedule: SliceSchedule = SCHEDULES[name]
    store, actions = make_store(PLANS[plan]), schedule.stages[stage]
    reading: list[LayerRecord] = []
    most = 0
    original = LayerRecord.prefetch

    def prefetch(record: LayerRecord) -> None:
        nonlocal most
        original(record)
        reading.append(record)
        most = max(most, sum(one.is_waiting for one in {id(one): one for one in reading}.values()))

    monkeypatch.setattr(LayerRecord, "prefetch", prefetch)
    got = run_stage(store, actions, num_layers)
    store.check_empty()
    for one, other in zip(got, run_stage(None, actions, num_layers), strict=True):
        assert_equal(one, other, PLANS[plan], 40)
    turns = sum((one.kind, two) == ("F", one._replace(kind="B")) for one, two in itertools.pairwise(actions))
    units = schedule.num_forwards
    if plan == "resident":
        assert store.counts.reads == units * num_layers - resident_units(schedule, num_layers)
    else:
        assert store.counts.reads == units * num_layers - turns
    assert store.counts.late_reads == 0
    assert most <= 2


def resident_units(schedule: SliceSchedule, num_layers: int) -> int:
    """The last layer of the last chunk is resident.

    A chunk whose backward follows immediately also keeps its last layer.
    """
    return schedule.num_forwards // schedule.num_chunks


def test_without_an_order_the_last_layer_is_read_late() -> None:
    """Given shares swap all layers, and the backward pass follows immediately."""
    store = make_store(ActivationPlan("shares", 1.0, 0.0, 1.0))
    layers = [ToyLayer(number, store) for number in (1, 2, 3)]
    for seed in range(2):
        out = inputs_of(20, seed=seed)
        for layer in layers:
            out = layer(out)
        out.sum().backward()
        store.check_empty()
    assert (store.counts.reads, store.counts.late_reads) == (6, 2)
