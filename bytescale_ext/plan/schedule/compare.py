"""Compare pipeline schedules: idle time and activations of 1F1B, interleaved 1F1B, Seq1F1B and Seq1F1B-I.

The models are the GPTs of the Seq1F1B paper (Sun et al. 2024, section 4) and ByteScale's 7B model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import KEY_SUM_BYTES, LLAMA_7B, ModelShape, key_value_bytes
from bytescale_ext.plan.schedule.actions import SliceSchedule, bubble_of_equal_costs, seq1f1b_schedule
from bytescale_ext.plan.schedule.simulate import SimulatedSchedule, peak_in_flight, simulate_slices
from bytescale_ext.plan.schedule.slices import Partition, layer_cost, slice_costs, slice_lengths
from bytescale_ext.plan.step.sizes import Slicing

LAYER_BYTES_PER_HIDDEN: Final = 34.0
"""Bytes of activations per token and layer, divided by the hidden size, without recompute and without stored attention
scores (Korthikanti et al. 2022, Eq. 2 and section 5). Tensor and sequence parallelism divide it."""


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model of the Seq1F1B paper with its parallelism.

    Attributes:
        shape: sizes of the model; the vocabulary is GPT-2's, padded.
        num_stages: pipeline stages; one pipeline uses all GPUs of the paper.
        tensor_parallel: ranks that share a layer, with sequence parallelism.
        seq_lengths: sequence lengths of the paper's experiments.
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
"""Share of the weight gradients in the linear work of a backward pass: one of two matrix products of equal size."""

SHAPES: Final = {"llama-7b": LLAMA_7B, **{name: model.shape for name, model in PAPER_MODELS.items()}}
"""Shapes that the command line offers by name."""


@dataclass(frozen=True, slots=True)
class SliceModel:
    """The model and the sequence length for a comparison of schedules.

    Attributes:
        shape: sizes of the model.
        seq_length: tokens of a micro-batch.
        tensor_parallel: ranks that share a layer, with sequence parallelism if there are several.
        measured: costs of this model; None: costs are FLOPs (see ``layer_cost``).
    """

    shape: ModelShape
    seq_length: int
    tensor_parallel: int = 1
    measured: ModelCost | None = None

    def layer_bytes(self) -> float:
        """Return the bytes of activations per token and layer on each rank."""
        if self.measured is not None:
            return self.measured.layer_bytes
        return LAYER_BYTES_PER_HIDDEN * self.shape.hidden / self.tensor_parallel

    def sum_bytes(self) -> float:
        """Return the bytes of the float32 gradient sums of keys and values per token and layer on each rank."""
        return key_value_bytes(self.shape, self.tensor_parallel, KEY_SUM_BYTES)


@dataclass(frozen=True, slots=True)
class ScheduleFigures:
    """The figures of one schedule.

    Attributes:
        name: "1F1B", "1F1B-I", "Seq1F1B" or "Seq1F1B-I", then the partition of slices and the order of work.
        slices: tokens of each slice.
        bubble: simulated share of idle time, with slices that cost time, whatever the partition.
        bubble_of_equal_costs: share of idle time if all slices cost the same, by the formula; with zero bubble,
            simulated with equal times of the three passes.
        relative_time: simulated time relative to the same work without idle time.
        peak_slices: peak number of slices (times chunks) with activations on stage 0.
        peak_micro_batches: peak number of tokens with activations on stage 0, in whole micro-batches of its layers.
        activation_bytes: peak bytes of activations and gradient sums of keys on stage 0.
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
    """Return the name of a schedule in the papers (ZB: zero bubble), with the partition of its slices."""
    interleaved = "-I" if num_chunks > 1 else ""
    name = f"1F1B{interleaved}"
    if slicing.num_slices > 1:
        name = f"Seq{name} {partition if isinstance(partition, str) else 'explicit'}"
    words = (name, slicing.order, "ZB" if slicing.zero_bubble else "")
    return " ".join(word for word in words if word)


def simulate_model(model: SliceModel, schedule: SliceSchedule, lengths: tuple[int, ...]) -> SimulatedSchedule:
    """Simulate a schedule on stages with equally many layers, in seconds if the model was measured, else in FLOPs.

    ``lengths``: tokens of each slice.
    """
    cost = layer_cost(model.shape, "time", model.measured)
    num_layers = model.shape.num_layers / (schedule.num_stages * schedule.num_chunks)
    backward = slice_costs(lengths, cost.backward.scaled(num_layers))
    token_weights = WEIGHT_SHARE * num_layers * cost.backward.b if schedule.slicing.zero_bubble else 0.0
    weights = [token_weights * length for length in lengths]
    times = {
        "F": slice_costs(lengths, cost.forward.scaled(num_layers)),
        "B": [whole - weight for whole, weight in zip(backward, weights, strict=True)],
        "W": weights,
    }
    return simulate_slices(schedule, lambda stage, action: times[action.kind][action.slice_index])


def model_slice_lengths(model: SliceModel, num_slices: int, partition: Partition) -> tuple[int, ...]:
    """Return the tokens of each slice of the model's micro-batches. Raises ValueError as ``slice_lengths``."""
    cost = None
    if partition in ("flops", "time"):
        cost = layer_cost(model.shape, str(partition), model.measured).both
    return slice_lengths(model.seq_length, num_slices, partition, cost, model.tensor_parallel)


def schedule_figures(
    model: SliceModel,
    num_stages: int,
    num_micro_batches: int,
    slicing: Slicing,
    num_chunks: int = 1,
    partition: Partition = "time",
) -> ScheduleFigures:
    """Simulate one schedule, and return its figures. Raises ValueError for sizes that do not fit."""
    schedule = seq1f1b_schedule(num_stages, num_micro_batches, slicing, num_chunks)
    lengths = model_slice_lengths(model, slicing.num_slices, partition)
    result = simulate_model(model, schedule, lengths)
    tokens = peak_in_flight(schedule, 0, [float(length) for length in lengths])
    activations = [length * model.layer_bytes() for length in lengths]
    sums = [length * model.sum_bytes() for length in lengths]
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
        peak_slices=int(peak_in_flight(schedule, 0)),
        peak_micro_batches=tokens / (model.seq_length * num_chunks),
        activation_bytes=peak_in_flight(schedule, 0, activations, sums) * layers,
    )


def compare_schedules(
    model: SliceModel,
    num_stages: int,
    num_micro_batches: int,
    slicing: Slicing,
    num_chunks: int = 1,
    partition: Partition = "time",
) -> tuple[ScheduleFigures, ...]:
    """Return the figures of 1F1B and Seq1F1B, each without and with ``num_chunks`` virtual stages.

    Seq1F1B with even slices is added for comparison, and ``slicing`` itself if it is eager or has zero bubble. Virtual
    stages are left out for one chunk, and for one or two stages, which Megatron does not interleave.
    """
    chunks = (1, num_chunks) if num_chunks > 1 and num_stages > 2 else (1,)
    plain = Slicing(slicing.num_slices)
    partitions = dict.fromkeys(("even", partition)) if plain.num_slices > 1 else {}
    rows: list[tuple[Slicing, int, Partition]] = [(Slicing(), count, "even") for count in chunks]
    rows += [(plain, count, kind) for count in chunks for kind in partitions]
    if slicing.order or slicing.zero_bubble:
        rows.append((slicing, 1, partition))
    return tuple(schedule_figures(model, num_stages, num_micro_batches, *row) for row in rows)
