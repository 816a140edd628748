"""Timelines of ranks, measured (one JSON line per phase) or planned, and their Perfetto traces."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NotRequired, TypedDict

from bytescale_ext.json_input import json_settings, lines_of_text, real, stored_text, whole
from bytescale_ext.new_file import write_text
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_shape import BACKWARD_PER_FORWARD
from bytescale_ext.plan.evaluate.replay import replay
from bytescale_ext.plan.step.micro_batch import MicroBatch
from bytescale_ext.plan.step.plan import StepPlan

KINDS: Final = ("forward", "backward", "reduce", "optimizer", "wait")
LARGEST_TIME: Final = 1e15  # seconds
COMPUTE_KINDS: Final = ("forward", "backward")
_FILE_NAME = re.compile(r"rank(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class PhaseShard:
    """A shard in a phase: ``tokens`` of the ``length`` tokens of sequence ``seq``, shared by the ranks of ``ring``."""

    seq: int
    length: int
    tokens: int
    ring: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of one rank.

    Attributes:
        step: number of the step.
        rank: number of the rank.
        kind: one of ``KINDS``.
        micro_batch: number of the micro-batch, or None outside of micro-batches.
        start: first second, on a clock that all ranks share.
        stop: last second, on the same clock.
        shards: shards of the micro-batch; empty outside of micro-batches.
    """

    step: int
    rank: int
    kind: str
    micro_batch: int | None
    start: float
    stop: float
    shards: tuple[PhaseShard, ...] = ()


class _ShardJson(TypedDict):
    seq: int
    length: int
    tokens: int
    ring: list[int]


class _PhaseJson(TypedDict):
    step: int
    rank: int
    kind: str
    micro_batch: NotRequired[int | None]
    start: float
    stop: float
    shards: NotRequired[list[_ShardJson]]


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Computing time of one rank.

    Attributes:
        rank: number of the rank.
        busy: total time of forward and backward passes.
        finish: end of the last forward or backward pass, from the first phase of the step on; 0 without passes.
        busy_share: ``busy`` over the latest ``finish`` of all ranks.
    """

    rank: int
    busy: float
    finish: float
    busy_share: float


def read_phases(directory: str | Path, step: int | None = None) -> tuple[Phase, ...]:
    """Read the phases of one step from ``rank{r}.jsonl`` of all ranks, ordered by rank and then as in the file.

    Args:
        directory: folder with one file for each of the ranks 0 to n-1.
        step: number of the step; None for the latest step that every rank has.

    Raises:
        ValueError: the directory or a rank's file is missing, a line is not a phase, or a rank lacks the step.
    """
    files = _rank_files(Path(directory))
    phases = [phase for rank, path in enumerate(files) for phase in _read_file(path, rank)]
    steps_of_rank: list[set[int]] = [set() for _ in files]
    for phase in phases:
        steps_of_rank[phase.rank].add(phase.step)
    common = set.intersection(*steps_of_rank)
    if step is None:
        if not common:
            raise ValueError(f"no step in {directory} has phases of all {len(files)} ranks")
        step = max(common)
    elif step not in common:
        lacking = [rank for rank, steps in enumerate(steps_of_rank) if step not in steps]
        known = f"steps {min(common)} to {max(common)} are complete" if common else "no step is complete"
        raise ValueError(f"step {step} has no phases of ranks {lacking[:8]} in {directory}; {known}")
    return tuple(phase for phase in phases if phase.step == step)


def phases_of_plan(plan: StepPlan, cost: CostModel, step: int = 0) -> tuple[Phase, ...]:
    """Return the timeline of a plan without pipeline stages as ``replay`` predicts it, in the unit of the cost model.

    Each micro-batch has a forward phase, directly followed by a backward phase twice as long.
    """
    result = replay(plan, cost)
    phases: list[Phase] = []
    for rank, micro_batches in enumerate(plan.ranks):
        for index, micro_batch in enumerate(micro_batches):
            start = result.starts[rank][index]
            stop = start + cost.micro_batch_cost(micro_batch, plan.lengths)  # excludes waiting for the ring
            turn = start + (stop - start) / (1.0 + BACKWARD_PER_FORWARD)
            shards = _phase_shards(micro_batch, plan)
            phases.append(Phase(step, rank, "forward", index, start, turn, shards))
            phases.append(Phase(step, rank, "backward", index, turn, stop, shards))
    return tuple(phases)


def rank_times(phases: Sequence[Phase], num_ranks: int | None = None) -> tuple[RankTimes, ...]:
    """Return the times of ranks 0 to n-1. By default n - 1 is the highest rank with a phase."""
    if num_ranks is None:
        num_ranks = max((phase.rank for phase in phases), default=-1) + 1
    origin = min((phase.start for phase in phases), default=0.0)
    busy = [0.0] * num_ranks
    finish = [0.0] * num_ranks
    for phase in phases:
        if phase.kind in COMPUTE_KINDS:
            busy[phase.rank] += phase.stop - phase.start
            finish[phase.rank] = max(finish[phase.rank], phase.stop - origin)
    last = max(finish, default=0.0)
    return tuple(
        RankTimes(rank, busy[rank], finish[rank], busy[rank] / last if last else 0.0) for rank in range(num_ranks)
    )


def shard_parts(phase: Phase) -> Iterator[tuple[PhaseShard, float, float]]:
    """Yield each shard of a phase with its (start, stop), in proportion to the shard's tokens.

    The times are for drawing only: the shards of a micro-batch run together and are not timed separately.
    """
    total = sum(shard.tokens for shard in phase.shards)
    done = 0
    for shard in phase.shards:
        start = phase.start + (phase.stop - phase.start) * done / total
        done += shard.tokens
        yield shard, start, phase.start + (phase.stop - phase.start) * done / total


def write_perfetto(phases: Sequence[Phase], path: str | Path) -> None:
    """Write a Chrome trace (JSON), which Perfetto reads.

    The trace has one process "HDP ranks" with one thread per rank. A phase is an "X" event, in microseconds since the
    first start, and its shards are nested "X" events. Flow arrows ("s" to "f") connect the shards of a ring in order of
    their start.
    """
    events: list[dict[str, object]] = [_metadata("process_name", 0, "HDP ranks")]
    for rank in sorted({phase.rank for phase in phases}):
        events.append(_metadata("thread_name", rank, f"rank {rank}"))
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": {"sort_index": rank}})
    origin = min((phase.start for phase in phases), default=0.0)
    joins: dict[tuple[int, str, int], list[tuple[float, int]]] = {}
    for phase in phases:
        events.append(
            _slice(_phase_name(phase), phase.kind, phase.rank, (phase.start - origin, phase.stop - origin), {})
        )
        for shard, start, stop in shard_parts(phase):
            name = f"seq {shard.seq}"
            args = {"sequence": shard.seq, "length": shard.length, "tokens": shard.tokens, "ring": list(shard.ring)}
            events.append(_slice(name, phase.kind, phase.rank, (start - origin, stop - origin), args))
            if len(shard.ring) > 1:
                joins.setdefault((phase.step, phase.kind, shard.seq), []).append((start - origin, phase.rank))
    events.extend(_flows(joins))
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    write_text(path, text)


def _rank_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give the folder with rank0.jsonl, rank1.jsonl, ...")
    files = {int(match[1]): path for path in directory.iterdir() if (match := _FILE_NAME.fullmatch(path.name))}
    if not files:
        raise ValueError(f"{directory} contains no rank0.jsonl, rank1.jsonl, ...; did the run write its timeline?")
    if max(files) >= len(files):
        missing = [rank for rank in range(len(files) + 8) if rank not in files and rank < max(files)][:8]
        raise ValueError(f"{directory} has rank{str(max(files))[:20]}.jsonl but no files of ranks {missing}")
    return [files[rank] for rank in range(len(files))]


def _read_file(path: Path, rank: int) -> Iterator[Phase]:
    for number, line in enumerate(lines_of_text(stored_text(path)), start=1):
        if not line.strip():
            continue
        try:
            phase = _phase_from_json(json_settings(line))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path} line {number} is not a phase: {type(error).__name__}: {error}") from error
        if phase.rank != rank:
            raise ValueError(f"{path} line {number} is a phase of rank {phase.rank}")
        yield phase


def _phase_from_json(value: _PhaseJson) -> Phase:
    """Read one phase. Raises KeyError, TypeError, AttributeError or ValueError if the value is not a phase."""
    shards = tuple(
        PhaseShard(
            seq=whole(shard["seq"]),
            length=whole(shard["length"]),
            tokens=whole(shard["tokens"]),
            ring=tuple(whole(rank) for rank in shard["ring"]),
        )
        for shard in value.get("shards", ())
    )
    micro_batch = value.get("micro_batch")
    phase = Phase(
        step=whole(value["step"]),
        rank=whole(value["rank"]),
        kind=str(value["kind"]),
        micro_batch=None if micro_batch is None else whole(micro_batch),
        start=real(value["start"]),
        stop=real(value["stop"]),
        shards=shards,
    )
    if phase.kind not in KINDS:
        raise ValueError(f"kind {phase.kind!r} is not one of {', '.join(KINDS)}")
    if not -LARGEST_TIME < phase.start <= phase.stop < LARGEST_TIME:
        raise ValueError(f"start {phase.start} is after stop {phase.stop}, or one of them is too large")
    if any(shard.tokens < 1 for shard in shards):
        raise ValueError("a shard has no tokens")
    return phase


def _phase_shards(micro_batch: MicroBatch, plan: StepPlan) -> tuple[PhaseShard, ...]:
    return tuple(
        PhaseShard(shard.seq, plan.lengths[shard.seq], shard.num_tokens, shard.ring) for shard in micro_batch.shards
    )


def _phase_name(phase: Phase) -> str:
    return phase.kind if phase.micro_batch is None else f"{phase.kind} {phase.micro_batch}"


def _metadata(name: str, tid: int, text: str) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": 0, "tid": tid, "args": {"name": text}}


def _micros(seconds: float) -> float:
    """Return microseconds, rounded to nanoseconds so that a nested event never exceeds its parent."""
    return round(seconds * 1e9) / 1e3


def _slice(name: str, kind: str, rank: int, times: tuple[float, float], args: dict[str, object]) -> dict[str, object]:
    start, stop = _micros(times[0]), _micros(times[1])
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": 0,
        "tid": rank,
        "ts": start,
        "dur": round(stop - start, 3),
        "args": args,
    }


def _flows(joins: dict[tuple[int, str, int], list[tuple[float, int]]]) -> Iterator[dict[str, object]]:
    """Yield arrows between the shards of a ring in order of their start: a flow must not point back in time."""
    number = 0
    for (_, kind, seq), members in joins.items():
        for (start, rank), (next_start, next_rank) in itertools.pairwise(sorted(members)):
            number += 1
            base = {"name": f"ring of seq {seq}", "cat": kind, "id": number, "pid": 0}
            yield {**base, "ph": "s", "tid": rank, "ts": _micros(start)}
            yield {**base, "ph": "f", "bp": "e", "tid": next_rank, "ts": _micros(next_start)}
