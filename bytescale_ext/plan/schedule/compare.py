"""Pipeline schedules side by side: idle time and activations of 1F1B, interleaved 1F1B, Seq1F1B and Seq1F1B-I.

The models are GPTs, with which Seq1F1B was measured (Sun et al. 2024, section 4), and ByteScale's 7B model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import KEY_SUM_BYTES, LLAMA_7B, ModelShape, key_value_bytes
from bytescale_ext.plan.schedule.actions import SliceSchedule, bubble_of_equal_costs, seq1f1b_schedule
from bytescale_ext.plan.schedule.simulate import Simulated, peak_held, simulate_slices
from bytescale_ext.plan.schedule.slices import Partition, layer_cost, slice_costs, slice_lengths
from bytescale_ext.plan.step.sizes import Slicing

LAYER_BYTES_PER_HIDDEN: Final = 34.0
"""Activations of a token in one layer, in bytes per unit of the hidden size, without recompute and with attention that
keeps no scores (Korthikanti et al. 2022, Eq. 2 and section 5); tensor and sequence parallelism divide it."""


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model of the paper with the parallelism it ran with.

    Attributes:
        shape: of the model; the vocabulary is GPT-2's, padded.
        num_stages: pipeline stages; with ``tensor_parallel`` one pipeline fills the paper's GPUs.
        tensor_parallel: ranks that share a layer, with sequence parallelism.
        seq_lengths: sequence lengths that the paper trained with.
    """

    shape: ModelShape
    num_stages: int
    tensor_parallel: int
    seq_lengths: tuple[int, ...]


def _gpt(num_layers: int, hidden: int, num_heads: int) -> ModelShape:
    return ModelShape(num_layers, hidden, num_heads, num_heads, hidden // num_heads, 4 * hidden, False, 51200)


PAPER_MODELS: Final = {
    "gpt-2.7b": PaperModel(_gpt(32, 2560, 32), 8, 1, (16384, 24576, 32768)),
    "gpt-7b": PaperModel(_gpt(32, 4096, 32), 4, 8, (32768, 65536, 131072)),
    "gpt-13b": PaperModel(_gpt(40, 5120, 40), 4, 8, (32768, 49152, 65536)),
    "gpt-30b": PaperModel(_gpt(64, 6144, 64), 8, 8, (32768, 49152, 65536)),
}

WEIGHT_SHARE: Final = 0.5
"""Weight gradients' share of the linear part of a backward pass: one of two matrix products of equal size."""

SHAPES: Final = {"llama-7b": LLAMA_7B, **{name: model.shape for name, model in PAPER_MODELS.items()}}
"""Model shapes by name, for the command line."""


@dataclass(frozen=True, slots=True)
class SliceModel:
    """The model and the sequence length for which schedules are compared.

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
        """Return the bytes of activations that one token keeps in one layer on each rank."""
        if self.measured is not None:
            return self.measured.layer_bytes
        return LAYER_BYTES_PER_HIDDEN * self.shape.hidden / self.tensor_parallel

    def sum_bytes(self) -> float:
        """Return the bytes of the gradient sums of one token's key and value in one layer on each rank, in float32."""
        return key_value_bytes(self.shape, self.tensor_parallel, KEY_SUM_BYTES)


@dataclass(frozen=True, slots=True)
class ScheduleFigures:
    """The figures of one schedule.

    Attributes:
        name: "1F1B", "1F1B-I", "Seq1F1B" or "Seq1F1B-I", with the partition where there are slices, and the order.
        slices: tokens of each slice.
        bubble: simulated share of idle time; slices are costed by time whatever the partition.
        bubble_of_equal_costs: by the formula; with zero bubble simulated, with equal times of the three passes.
        relative_time: simulated, against the same work without any idle time.
        peak_slices: most slices (times chunks) held by stage 0.
        peak_micro_batches: the same in whole micro-batches of the stage's layers, by tokens.
        activation_bytes: most bytes of stage 0 in activations and in the sums of key gradients over slices.
    """

    name: str
    slices: tuple[int, ...]
    bubble: float
    bubble_of_equal_costs: float
    relative_time: float
    peak_slices: int
    peak_micro_batches: float
    activation_bytes: float

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        return asdict(self)


def schedule_name(slicing: Slicing, num_chunks: int, partition: Partition) -> str:
    """Return the schedule's name in the papers (ZB: zero bubble), and how slices are cut."""
    interleaved = "-I" if num_chunks > 1 else ""
    name = f"1F1B{interleaved}"
    if slicing.num_slices > 1:
        name = f"Seq{name} {partition if isinstance(partition, str) else 'explicit'}"
    words = (name, slicing.order, "ZB" if slicing.zero_bubble else "")
    return " ".join(word for word in words if word)


def simulated(model: SliceModel, schedule: SliceSchedule, lengths: tuple[int, ...]) -> Simulated:
    """Return the schedule with times: seconds of a measured model, else FLOPs. Stages have equally many layers."""
    cost = layer_cost(model.shape, "time", model.measured)
    num_layers = model.shape.num_layers / (schedule.num_stages * schedule.num_chunks)
    backward = slice_costs(lengths, cost.backward.scaled(num_layers))
    split = WEIGHT_SHARE * num_layers * cost.backward.b if schedule.slicing.zero_bubble else 0.0
    weights = [split * length for length in lengths]
    times = {
        "F": slice_costs(lengths, cost.forward.scaled(num_layers)),
        "B": [seconds - later for seconds, later in zip(backward, weights, strict=True)],
        "W": weights,
    }
    return simulate_slices(schedule, lambda stage, action: times[action.kind][action.slice_index])


def lengths_of(model: SliceModel, num_slices: int, partition: Partition) -> tuple[int, ...]:
    """Return the tokens of each slice of this model's micro-batches. Raises ValueError as ``slice_lengths``."""
    cost = None
    if partition in ("flops", "time"):
        cost = layer_cost(model.shape, str(partition), model.measured).both
    return slice_lengths(model.seq_length, num_slices, partition, cost, model.tensor_parallel)


def evaluate(
    model: SliceModel,
    num_stages: int,
    num_micro_batches: int,
    slicing: Slicing,
    num_chunks: int = 1,
    partition: Partition = "time",
) -> ScheduleFigures:
    """Make and simulate one schedule, and return its figures. Raises ValueError for sizes that do not fit."""
    schedule = seq1f1b_schedule(num_stages, num_micro_batches, slicing, num_chunks)
    lengths = lengths_of(model, slicing.num_slices, partition)
    result = simulated(model, schedule, lengths)
    tokens = peak_held(schedule, 0, [float(length) for length in lengths])
    held, sums = ([length * each for length in lengths] for each in (model.layer_bytes(), model.sum_bytes()))
    layers = model.shape.num_layers / (num_stages * num_chunks)
    if slicing.zero_bubble:
        equal = simulate_slices(schedule, lambda stage, action: 1.0).bubble
    else:
        equal = bubble_of_equal_costs(num_stages, num_micro_batches, slicing.num_slices, num_chunks)
    return ScheduleFigures(
        name=schedule_name(slicing, num_chunks, partition),
        slices=lengths,
        bubble=result.bubble,
        bubble_of_equal_costs=equal,
        relative_time=1.0 / (1.0 - result.bubble),
        peak_slices=int(peak_held(schedule, 0)),
        peak_micro_batches=tokens / (model.seq_length * num_chunks),
        activation_bytes=peak_held(schedule, 0, held, sums) * layers,
    )


def compared(
    model: SliceModel,
    num_stages: int,
    num_micro_batches: int,
    slicing: Slicing,
    num_chunks: int = 1,
    partition: Partition = "time",
) -> tuple[ScheduleFigures, ...]:
    """Return the figures of 1F1B and Seq1F1B, each without and with ``num_chunks`` virtual stages.

    Seq1F1B with even slices is added for comparison. Rows of virtual stages are left out with one chunk or up to two
    stages, which Megatron does not interleave. A slicing in the eager order, or with zero bubble, adds a row.
    """
    chunks = (1, num_chunks) if num_chunks > 1 and num_stages > 2 else (1,)
    plain = Slicing(slicing.num_slices)
    partitions = dict.fromkeys(("even", partition)) if plain.num_slices > 1 else {}
    rows: list[tuple[Slicing, int, Partition]] = [(Slicing(), count, "even") for count in chunks]
    rows += [(plain, count, kind) for count in chunks for kind in partitions]
    if slicing.order or slicing.zero_bubble:
        rows.append((slicing, 1, partition))
    return tuple(evaluate(model, num_stages, num_micro_batches, *row) for row in rows)
