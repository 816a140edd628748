"""Pipeline schedules side by side: idle time and activations of 1F1B, interleaved 1F1B, Seq1F1B, Seq1F1B-I."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from bytescale_ext.plan.cost import ModelCost, ModelShape
from bytescale_ext.plan.seq1f1b import SliceSchedule, bubble_of_equal_costs, seq1f1b_schedule
from bytescale_ext.plan.seq1f1b_simulate import Simulated, peak_held, simulate_slices
from bytescale_ext.plan.slices import Partition, layer_cost, slice_costs, slice_lengths

LAYER_BYTES_PER_HIDDEN: Final = 34.0
"""Activations of a token in one layer, in bytes per unit of the hidden size, without recompute and with attention that
keeps no scores (Korthikanti et al. 2022, Eq. 2 and section 5); tensor and sequence parallelism divide it."""


@dataclass(frozen=True, slots=True)
class SliceModel:
    """What is trained, as far as schedules depend on it.

    Attributes:
        shape: of the model.
        seq_length: tokens of a micro-batch.
        tensor_parallel: ranks that share a layer, with sequence parallelism where there are several.
        measured: a cost file of this model, or None: FLOPs (see ``layer_cost``).
    """

    shape: ModelShape
    seq_length: int
    tensor_parallel: int = 1
    measured: ModelCost | None = None

    def layer_bytes(self) -> float:
        """Activations that one token keeps in one layer on each rank."""
        if self.measured is not None:
            return self.measured.layer_bytes
        return LAYER_BYTES_PER_HIDDEN * self.shape.hidden / self.tensor_parallel


@dataclass(frozen=True, slots=True)
class ScheduleFigures:
    """One schedule and what it comes to.

    Attributes:
        name: "1F1B", "1F1B-I", "Seq1F1B" or "Seq1F1B-I", with the partition where there are slices, and "eager".
        slices: tokens of each slice.
        bubble: simulated share of idle time; slices are costed by time whatever the partition.
        bubble_of_equal_costs: by the formula.
        relative_time: simulated, against the same work without any idle time.
        peak_slices: most slices (times chunks) held by stage 0.
        peak_micro_batches: the same in whole micro-batches of the stage's layers, by tokens.
        activation_bytes: the same in bytes.
    """

    name: str
    slices: tuple[int, ...]
    bubble: float
    bubble_of_equal_costs: float
    relative_time: float
    peak_slices: int
    peak_micro_batches: float
    activation_bytes: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def schedule_name(num_slices: int, num_chunks: int, partition: Partition, eager: bool = False) -> str:
    """The schedule's name in the papers, and how slices are cut."""
    interleaved, order = "-I" if num_chunks > 1 else "", " eager" if eager else ""
    if num_slices == 1:
        return f"1F1B{interleaved}{order}"
    return f"Seq1F1B{interleaved} {partition if isinstance(partition, str) else 'explicit'}{order}"


def simulated(model: SliceModel, schedule: SliceSchedule, lengths: tuple[int, ...]) -> Simulated:
    """The schedule with times: seconds of a measured model, FLOPs otherwise. Layers are shared out evenly."""
    cost = layer_cost(model.shape, "time", model.measured)
    num_layers = model.shape.num_layers / (schedule.num_stages * schedule.num_chunks)
    times = {
        "F": slice_costs(lengths, cost.forward.scaled(num_layers)),
        "B": slice_costs(lengths, cost.backward.scaled(num_layers)),
    }
    return simulate_slices(schedule, lambda stage, action: times[action.kind][action.slice_index])


def lengths_of(model: SliceModel, num_slices: int, partition: Partition) -> tuple[int, ...]:
    """Tokens of each slice of this model's micro-batches. Raises ValueError as ``slice_lengths`` does."""
    cost = None
    if partition in ("flops", "time"):
        cost = layer_cost(model.shape, str(partition), model.measured).both
    return slice_lengths(model.seq_length, num_slices, partition, cost, model.tensor_parallel)


def figures_of(
    model: SliceModel,
    num_stages: int,
    num_micro_batches: int,
    num_slices: int,
    num_chunks: int,
    partition: Partition,
    eager: bool = False,
) -> ScheduleFigures:
    """Make, simulate and measure one schedule. Raises ValueError for sizes that do not fit."""
    schedule = seq1f1b_schedule(num_stages, num_micro_batches, num_slices, num_chunks, eager=eager)
    lengths = lengths_of(model, num_slices, partition)
    result = simulated(model, schedule, lengths)
    tokens = peak_held(schedule, 0, [float(length) for length in lengths])
    layers = model.shape.num_layers / (num_stages * num_chunks)
    return ScheduleFigures(
        name=schedule_name(num_slices, num_chunks, partition, eager),
        slices=lengths,
        bubble=result.bubble,
        bubble_of_equal_costs=bubble_of_equal_costs(num_stages, num_micro_batches, num_slices, num_chunks),
        relative_time=1.0 / (1.0 - result.bubble),
        peak_slices=int(peak_held(schedule, 0)),
        peak_micro_batches=tokens / (model.seq_length * num_chunks),
        activation_bytes=tokens * layers * model.layer_bytes(),
    )


def compared(
    model: SliceModel,
    num_stages: int,
    num_micro_batches: int,
    num_slices: int,
    num_chunks: int,
    partition: Partition,
    eager: bool = False,
) -> tuple[ScheduleFigures, ...]:
    """1F1B and Seq1F1B, each without and with ``num_chunks`` virtual stages, and Seq1F1B of even slices beside it.

    Rows of virtual stages are left out with one chunk or up to two stages, which Megatron does not interleave. With
    ``eager`` Seq1F1B in the eager order is added.
    """
    chunks = (1, num_chunks) if num_chunks > 1 and num_stages > 2 else (1,)
    partitions = dict.fromkeys(("even", partition)) if num_slices > 1 else {}
    rows: list[tuple[int, int, Partition]] = [(1, count, "even") for count in chunks]
    rows += [(num_slices, count, kind) for count in chunks for kind in partitions]
    figures = [figures_of(model, num_stages, num_micro_batches, *row) for row in rows]
    if eager:
        figures.append(figures_of(model, num_stages, num_micro_batches, num_slices, 1, partition, eager))
    return tuple(figures)
