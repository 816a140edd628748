"""The order in which pipeline stages run slices of micro-batches: Seq1F1B (Sun et al. 2024), as a value.

1F1B over slices: forward in token order; backward in the opposite order inside a micro-batch, because the first
slice's keys and values are used by all later ones. For 2 stages, 2 micro-batches of 2 slices (F<micro-batch>.<slice>)::

    stage 0   F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0
    stage 1   F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0

With k slices a stage runs k - 1 more forwards before its first backward than 1F1B does. Megatron's own schedule
functions give these orders for ``num_micro_batches * num_slices`` micro-batches once they are told so.
One slice is Megatron's 1F1B, and its interleaved 1F1B with several chunks.

1F1B lets a stage be one forward ahead of the next stage, so whatever takes longer on one of them is waited for on
the other. An eager schedule lets it be two ahead (eager 1F1B, Zhuang et al. 2023, "On Optimizing the Communication of
Model Parallelism", section 4, there to hide messages): slices that differ in time then pass without waiting.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

Kind = Literal["F", "B"]


class Action(NamedTuple):
    """Forward ("F") or backward ("B") of one slice of a micro-batch through one chunk of a stage's layers."""

    kind: Kind
    micro_batch: int
    slice_index: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f"/{self.chunk}" if self.chunk else ""
        return f"{self.kind}{self.micro_batch}.{self.slice_index}{chunk}"


@dataclass(frozen=True, slots=True)
class SliceSchedule:
    """What every stage of a pipeline runs, in order.

    Attributes:
        num_stages: p; stage 0 has the embedding.
        num_micro_batches: m.
        num_slices: k of each micro-batch.
        num_chunks: v, virtual stages of each stage; chunk c of stage s holds part ``c * p + s`` of the layers.
        group_size: with virtual stages, slices that pass a chunk before the next chunk has its turn
            (Megatron's ``microbatch_group_size_per_vp_stage``, counted in slices); 1 without.
        eager: a stage runs two forwards ahead of the next stage, not one.
        stages: the actions of each stage. Not part of the constructor's usual use: ``seq1f1b_schedule`` makes them.
    """

    num_stages: int
    num_micro_batches: int
    num_slices: int
    num_chunks: int
    group_size: int
    eager: bool
    stages: tuple[tuple[Action, ...], ...] = field(repr=False)

    def __str__(self) -> str:
        """A table that ``parse_schedule`` reads back: a line of sizes, then a line of actions for each stage."""
        sizes = " ".join(f"{name} {int(getattr(self, name))}" for name in _SIZES)
        width = max(len(str(action)) for stage in self.stages for action in stage)
        rows = (
            f"stage {index:<3} {' '.join(f'{action!s:<{width}}' for action in stage).rstrip()}"
            for index, stage in enumerate(self.stages)
        )
        return "\n".join((sizes, *rows))


_SIZES: Final = ("num_stages", "num_micro_batches", "num_slices", "num_chunks", "group_size", "eager")
_ACTION: Final = re.compile(r"([FB])(\d+)\.(\d+)(?:/(\d+))?")


def seq1f1b_schedule(
    num_stages: int,
    num_micro_batches: int,
    num_slices: int = 1,
    num_chunks: int = 1,
    group_size: int | None = None,
    eager: bool = False,
) -> SliceSchedule:
    """The Seq1F1B schedule; Seq1F1B-I with several chunks.

    Args:
        num_stages, num_micro_batches, num_slices, num_chunks: see ``SliceSchedule``.
        group_size: see there; None: ``slice_group_size``, the one that keeps memory least.
        eager: see there; not with virtual stages, whose order has it already.

    Raises:
        ValueError: a size is not positive, or the sizes do not fit virtual stages (the message says what does).
    """
    for name, value in (("stages", num_stages), ("micro-batches", num_micro_batches),
                        ("slices", num_slices), ("virtual stages", num_chunks)):  # fmt: skip
        if value < 1:
            raise ValueError(f"the number of {name} is {value}; it must be at least 1")
    group = 1
    if num_chunks > 1:
        if eager:
            raise ValueError("virtual stages run two forwards ahead as it is: leave eager out")
        group = group_size or slice_group_size(num_stages, num_slices)
        check_groups(num_stages, num_micro_batches, num_slices, group)
    turns = chunk_turns(num_micro_batches * num_slices, num_chunks, group)
    forwards = [Action("F", unit // num_slices, unit % num_slices, chunk) for unit, chunk in turns]
    backwards = [
        Action("B", unit // num_slices, num_slices - 1 - unit % num_slices, num_chunks - 1 - chunk)
        for unit, chunk in turns
    ]
    stages = []
    for stage in range(num_stages):
        num_first = min(num_warm_up(num_stages, stage, num_slices, num_chunks, group, eager), len(forwards))
        actions = forwards[:num_first]
        for number, backward in enumerate(backwards):
            actions += forwards[num_first + number : num_first + number + 1]
            actions.append(backward)
        stages.append(tuple(actions))
    return SliceSchedule(num_stages, num_micro_batches, num_slices, num_chunks, group, eager, tuple(stages))


def num_warm_up(num_stages: int, stage: int, num_slices: int, num_chunks: int = 1, group_size: int = 1,
                eager: bool = False) -> int:  # fmt: skip
    """Forwards of a stage before its first "one forward, one backward": k - 1 more than Megatron's own schedules.

    An eager one has as many more as there are stages behind it.
    """
    behind = num_stages - stage - 1
    megatron = behind if num_chunks == 1 else 2 * behind + (num_chunks - 1) * group_size
    return megatron + num_slices - 1 + behind * eager


def slice_group_size(num_stages: int, num_slices: int) -> int:
    """The smallest group of virtual stages that holds whole micro-batches and fills the pipeline: k ceil(p / k).

    A group that cuts a micro-batch would run the first slices' next chunk before the last slices' chunk, and the
    backward pass, which mirrors the forward, would meet them in the wrong order.
    """
    return num_slices * -(-num_stages // num_slices)


def check_groups(num_stages: int, num_micro_batches: int, num_slices: int, group: int) -> None:
    """Raise ValueError when virtual stages do not run so many slices in groups of ``group``."""
    if group % num_slices or group < num_stages:
        raise ValueError(
            f"groups of {group} slices: with virtual stages a group holds whole micro-batches of {num_slices} slices "
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


def chunk_turns(num_units: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(unit, chunk) of every forward in order: a group through chunk 0, then chunk 1, ...; the last may be smaller."""
    if num_chunks == 1:
        return [(unit, 0) for unit in range(num_units)]
    return [
        (unit, chunk)
        for first in range(0, num_units, group_size)
        for chunk in range(num_chunks)
        for unit in range(first, min(first + group_size, num_units))
    ]


def parse_schedule(text: str) -> SliceSchedule:
    """The inverse of ``str``. Raises ValueError, with the line, for what is no schedule."""
    lines = [line for line in text.splitlines() if line.strip()]
    words = lines[0].split() if lines else []
    if tuple(words[0::2]) != _SIZES or not all(word.isdigit() for word in words[1::2]):
        raise ValueError(f"not a schedule: its first line must give {', '.join(_SIZES)}, each with a number")
    sizes = dict(zip(words[0::2], map(int, words[1::2]), strict=True))
    stages = []
    for index, line in enumerate(lines[1:]):
        found = line.split()
        matches = [_ACTION.fullmatch(word) for word in found[2:]]
        if found[:2] != ["stage", str(index)] or None in matches:
            raise ValueError(
                f"not a schedule: this line must be 'stage {index}' and actions like F0.1 or B0.1/2: {line}"
            )
        stages.append(tuple(_action(match) for match in matches if match is not None))
    if len(stages) != sizes["num_stages"]:
        raise ValueError(f"not a schedule: {sizes['num_stages']} stages are named and {len(stages)} are given")
    eager = bool(sizes.pop("eager"))
    return SliceSchedule(**sizes, eager=eager, stages=tuple(stages))


def _action(match: re.Match[str]) -> Action:
    kind, micro_batch, slice_index, chunk = match.groups()
    return Action("F" if kind == "F" else "B", int(micro_batch), int(slice_index), int(chunk or 0))


def bubble_of_equal_costs(num_stages: int, num_micro_batches: int, num_slices: int = 1, num_chunks: int = 1) -> float:
    """Share of a stage's time without work when all slices cost the same: (p-1) / (mkv + p-1) (Seq1F1B, section 3.4).

    With virtual stages: where the groups are full, ``num_micro_batches * num_slices`` a multiple of the group size.
    """
    return (num_stages - 1) / (num_micro_batches * num_slices * num_chunks + num_stages - 1)


def peak_slices(num_stages: int, stage: int, num_micro_batches: int, num_slices: int = 1,
                num_chunks: int = 1, group_size: int = 1, eager: bool = False) -> int:  # fmt: skip
    """Most slices (times chunks) whose activations a stage holds at once: warm-up and one, or all there are.

    Without virtual stages p - stage + k - 1, so (p - stage + k - 1) / k micro-batches (Seq1F1B, section 3.4); eager,
    2 (p - stage) + k - 2.
    """
    total = num_micro_batches * num_slices * num_chunks
    return min(total, num_warm_up(num_stages, stage, num_slices, num_chunks, group_size, eager) + 1)
