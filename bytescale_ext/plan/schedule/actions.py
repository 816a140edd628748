"""The running order of slices of micro-batches on the stages of a pipeline (Seq1F1B, Sun et al. 2024).

The order is 1F1B over slices. Forwards run in token order. Backwards of a micro-batch run in the opposite order,
because later slices use the keys and values of earlier slices. For 2 stages and 2 micro-batches of 2 slices
(F<micro-batch>.<slice>)::

    stage 0   F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0
    stage 1   F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0

With k slices a stage runs k - 1 more forwards before its first backward than with 1F1B. With one slice the order is
Megatron's 1F1B or, with several chunks, its interleaved 1F1B. Megatron's schedule functions run all of these orders.

Two pipelines with different numbers of micro-batches run their common micro-batches in the same order: the order of the
shorter pipeline is the order of the longer pipeline without the other micro-batches. With virtual stages this holds for
multiples of the group size. So rings between pipelines cannot wait for each other in a circle.

In the eager order a stage is two forwards ahead of the next stage, not one (eager 1F1B, Zhuang et al. 2023, "On
Optimizing the Communication of Model Parallelism", section 4). A slow slice then delays its neighbours less.

With ``Slicing.zero_bubble`` a stage also runs the weight gradients (W) of each slice, at the places that
``plan.schedule.deferred`` chooses. They do not change the order of the other actions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.schedule.deferred import insert_weight_gradients
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing

Ints = npt.NDArray[np.int64]
Kind = Literal["F", "B", "W"]

FORWARD: Final = 0
BACKWARD: Final = 1
KINDS: Final[tuple[Kind, ...]] = ("F", "B", "W")
"""Kinds of actions, indexed by FORWARD, BACKWARD and WEIGHTS."""


class Action(NamedTuple):
    """Forward ("F") or backward ("B") pass of one slice of a micro-batch through one chunk of a stage's layers.

    With zero bubble, "B" computes the input gradients and "W" the weight gradients of linear layers.
    """

    kind: Kind
    micro_batch: int
    slice_index: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f"/{self.chunk}" if self.chunk else ""
        return f"{self.kind}{self.micro_batch}.{self.slice_index}{chunk}"


@dataclass(frozen=True, slots=True)
class SliceSchedule:
    """The actions of every stage of a pipeline, in running order, as ``seq1f1b_schedule`` makes them.

    Attributes:
        num_stages: p, the number of stages; stage 0 has the embedding.
        num_micro_batches: m, the number of micro-batches.
        slicing: k slices of each micro-batch, and their order; settings of kept keys are ignored.
        num_chunks: v, the virtual stages of each stage; chunk c of stage s holds part ``c * p + s`` of the layers.
        group_size: slices that pass a chunk before the next chunk's turn (Megatron's
            ``microbatch_group_size_per_vp_stage``, counted in slices); 1 without virtual stages.
        stages: actions of each stage.
    """

    num_stages: int
    num_micro_batches: int
    slicing: Slicing
    num_chunks: int
    group_size: int
    stages: tuple[tuple[Action, ...], ...] = field(repr=False)

    @property
    def num_slices(self) -> int:
        """k."""
        return self.slicing.num_slices

    @property
    def num_forwards(self) -> int:
        """Number of forwards of each stage: m k v."""
        return self.num_micro_batches * self.num_slices * self.num_chunks

    def num_first_forwards(self, stage: int) -> int:
        """Return the number of forwards that a stage runs before the first "one forward, one backward"."""
        warm_up = num_warm_up(self.num_stages, stage, self.slicing, self.num_chunks, self.group_size)
        return min(warm_up, self.num_forwards)

    def peak_slices(self, stage: int) -> int:
        """Return the largest number of slices (times chunks) with activations on a stage at the same time.

        Without virtual stages these are p - stage + k - 1 slices (Seq1F1B, section 3.4), or 2 (p - stage) + k - 2 in
        the eager order. With ``Slicing.zero_bubble`` a stage holds slices until their weight gradients, and every stage
        may hold as many as the first stage.
        """
        return min(self.num_first_forwards(0 if self.slicing.zero_bubble else stage) + 1, self.num_forwards)

    def __str__(self) -> str:
        """Return a table for ``parse_schedule``: a line of sizes, then a line of actions for each stage."""
        counts = (self.num_stages, self.num_micro_batches, self.num_slices, self.num_chunks, self.group_size)
        values = (*counts, self.slicing.eager, self.slicing.zero_bubble)
        sizes = " ".join(f"{name} {int(n)}" for name, n in zip(_SIZES, values, strict=True))
        width = max(len(str(action)) for stage in self.stages for action in stage)
        rows = (
            f"stage {index:<3} {' '.join(f'{action!s:<{width}}' for action in stage).rstrip()}"
            for index, stage in enumerate(self.stages)
        )
        return "\n".join((sizes, *rows))


_SIZES: Final = ("num_stages", "num_micro_batches", "num_slices", "num_chunks", "group_size", "eager", "zero_bubble")
_ACTION: Final = re.compile(r"([FBW])(\d+)\.(\d+)(?:/(\d+))?")


def seq1f1b_schedule(
    num_stages: int,
    num_micro_batches: int,
    slicing: Slicing = ONE_SLICE,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> SliceSchedule:
    """Return the Seq1F1B schedule: 1F1B with one slice, Seq1F1B-I with several chunks.

    Args:
        num_stages, num_micro_batches, slicing, num_chunks: see ``SliceSchedule``.
        group_size: see ``SliceSchedule``; None: ``slice_group_size``, which needs the least memory.

    Raises:
        ValueError: a size is not positive, or virtual stages cannot run these sizes (the message names sizes that fit).
    """
    orders = work_orders(num_stages, num_micro_batches, slicing, num_chunks, group_size)
    group = (group_size or slice_group_size(num_stages, slicing.num_slices)) if num_chunks > 1 else 1
    k = slicing.num_slices
    stages = tuple(
        tuple(Action(KINDS[kind], unit // k, unit % k, chunk) for kind, unit, chunk in order.tolist())
        for order in orders
    )
    return SliceSchedule(num_stages, num_micro_batches, slicing, num_chunks, group, stages)


def stage_orders(
    num_stages: int,
    num_micro_batches: int,
    slicing: Slicing = ONE_SLICE,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> tuple[Ints, ...]:
    """Return the passes of each stage in running order, in columns FORWARD or BACKWARD, unit, chunk: [2 m k v, 3].

    Slice j of micro-batch i is unit ``i * k + j``. For the arguments see ``seq1f1b_schedule``.
    """
    return _stage_orders(num_stages, num_micro_batches, slicing.order_of_work(), num_chunks, group_size)


@lru_cache(maxsize=128)
def _stage_orders(
    num_stages: int, num_micro_batches: int, slicing: Slicing, num_chunks: int, group_size: int | None
) -> tuple[Ints, ...]:
    for name, value in (("stages", num_stages), ("micro-batches", num_micro_batches), ("virtual stages", num_chunks)):
        if value < 1:
            raise ValueError(f"the number of {name} is {value}; it must be at least 1")
    num_slices, group = slicing.num_slices, 1
    if num_chunks > 1:
        if slicing.eager:
            raise ValueError("virtual stages already run two forward passes ahead: omit eager")
        group = group_size or slice_group_size(num_stages, num_slices)
        check_groups(num_stages, num_micro_batches, num_slices, group)
    units, chunks = chunk_turns(num_micro_batches * num_slices, num_chunks, group)
    last_to_first = units + num_slices - 1 - 2 * (units % num_slices)
    forwards = np.stack((np.full_like(units, FORWARD), units, chunks), axis=1)
    backwards = np.stack((np.full_like(units, BACKWARD), last_to_first, num_chunks - 1 - chunks), axis=1)
    turns = np.arange(len(units))
    orders = []
    for stage in range(num_stages):
        num_first = min(num_warm_up(num_stages, stage, slicing, num_chunks, group), len(units))
        order = np.empty((2 * len(units), 3), dtype=np.int64)
        order[turns + np.maximum(turns - num_first, 0)] = forwards
        order[np.minimum(num_first + 1 + 2 * turns, len(units) + turns)] = backwards
        order.flags.writeable = False
        orders.append(order)
    return tuple(orders)


def work_orders(
    num_stages: int,
    num_micro_batches: int,
    slicing: Slicing = ONE_SLICE,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> tuple[Ints, ...]:
    """Return ``stage_orders``, with zero bubble including the weight gradients: [2 m k v or 3 m k v, 3]."""
    orders = stage_orders(num_stages, num_micro_batches, slicing, num_chunks, group_size)
    if not slicing.zero_bubble:
        return orders
    if num_chunks > 1:
        raise ValueError("zero bubble does not work with virtual stages")
    return insert_weight_gradients(orders, most_slices(num_stages, slicing))


def most_slices(num_stages: int, slicing: Slicing, stage: int = 0, num_chunks: int = 1) -> int:
    """Return the peak number of slices in all layers of a stage, rounded up. Stage 0 has the highest peak."""
    group = slice_group_size(num_stages, slicing.num_slices) if num_chunks > 1 else 1
    return -(-(num_warm_up(num_stages, stage, slicing, num_chunks, group) + 1) // num_chunks)


def num_warm_up(num_stages: int, stage: int, slicing: Slicing, num_chunks: int = 1, group_size: int = 1) -> int:
    """Return the number of forwards of a long schedule before the first "one forward, one backward".

    It is the number of Megatron's schedule plus ``Slicing.extra_warm_up``.
    """
    later = num_stages - stage - 1
    megatron = later if num_chunks == 1 else 2 * later + (num_chunks - 1) * group_size
    return megatron + slicing.extra_warm_up(later)


def slice_group_size(num_stages: int, num_slices: int) -> int:
    """Return the smallest group size of virtual stages with whole micro-batches that fills the pipeline: k ceil(p / k).

    If a group split a micro-batch, the first slices would run their next chunk before the last slices run this chunk.
    The backward pass mirrors the forward pass, so it would run slices in the wrong order.
    """
    return num_slices * -(-num_stages // num_slices)


def check_groups(num_stages: int, num_micro_batches: int, num_slices: int, group: int) -> None:
    """Raise ValueError if virtual stages cannot run these slices in groups of ``group``."""
    if group % num_slices or group < num_stages:
        raise ValueError(
            f"groups of {group} slices: with virtual stages a group has whole micro-batches of {num_slices} slices "
            f"and is at least the {num_stages} stages; the smallest is {slice_group_size(num_stages, num_slices)}"
        )
    total = num_micro_batches * num_slices
    rest = total % group
    if total < group or 0 < rest < num_stages:
        per_group = group // num_slices
        near = max(1, num_micro_batches // per_group) * per_group
        above = (num_micro_batches // per_group + 1) * per_group
        counts = f"{near}" if total < group else f"{near} or {above}"
        raise ValueError(
            f"{num_micro_batches} micro-batches of {num_slices} slices leave a group of {rest} slices for {num_stages} "
            f"stages; virtual stages run groups of {group} slices, so the nearest numbers of micro-batches are {counts}"
        )


def chunk_turns(num_units: int, num_chunks: int, group_size: int) -> Ints:
    """Return unit and chunk of every forward in running order: [2, forwards].

    A group passes chunk 0, then chunk 1, and so on. The last group may be smaller.
    """
    units = np.tile(np.arange(num_units), num_chunks)
    chunks = np.repeat(np.arange(num_chunks), num_units)
    order = np.lexsort((units, chunks, units // group_size))
    return np.stack((units[order], chunks[order]))


def parse_schedule(text: str) -> SliceSchedule:
    """Return the schedule that ``str`` printed. Raises ValueError, with the line, for any other text."""
    lines = [line for line in text.split("\n") if line.strip()]
    words = lines[0].split() if lines else []
    if tuple(words[0::2]) != _SIZES or not all(word.isdigit() for word in words[1::2]):
        raise ValueError(f"not a schedule: its first line must give {', '.join(_SIZES)}, each with a number")
    num_stages, num_micro_batches, num_slices, num_chunks, group_size, eager, zero_bubble = map(int, words[1::2])
    stages = []
    for index, line in enumerate(lines[1:]):
        line_words = line.split()
        matches = [_ACTION.fullmatch(word) for word in line_words[2:]]
        if line_words[:2] != ["stage", str(index)] or None in matches:
            raise ValueError(
                f"not a schedule: this line must be 'stage {index}' and actions like F0.1 or B0.1/2: {line}"
            )
        stages.append(tuple(_action(match) for match in matches if match is not None))
    if len(stages) != num_stages:
        raise ValueError(f"not a schedule: its first line gives {num_stages} stages, but {len(stages)} follow")
    slicing = Slicing(num_slices, eager=bool(eager), zero_bubble=bool(zero_bubble))
    return SliceSchedule(num_stages, num_micro_batches, slicing, num_chunks, group_size, tuple(stages))


def _action(match: re.Match[str]) -> Action:
    kind, micro_batch, slice_index, chunk = match.groups()
    return Action(KINDS[KINDS.index(kind)], int(micro_batch), int(slice_index), int(chunk or 0))


def bubble_of_equal_costs(num_stages: int, num_micro_batches: int, num_slices: int = 1, num_chunks: int = 1) -> float:
    """Return the share of idle time of a stage if all slices cost the same: (p-1) / (mkv + p-1) (Seq1F1B, 3.4).

    With virtual stages this holds if all groups are full.
    """
    return (num_stages - 1) / (num_micro_batches * num_slices * num_chunks + num_stages - 1)
