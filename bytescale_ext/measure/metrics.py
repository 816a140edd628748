"""Metrics of a training step: times on this rank, totals over ranks, and the log line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path

import torch

from bytescale_ext.json_input import finite
from bytescale_ext.measure.stragglers import Straggler
from bytescale_ext.measure.timeline import Phase, PhaseShard
from bytescale_ext.new_file import appended, make_folder
from bytescale_ext.plan.step.micro_batch import MicroBatch


@dataclass(frozen=True)
class Mark:
    """Start of a phase, which lasts until the next mark.

    Attributes:
        kind: kind of the phase, such as ``forward``.
        micro_batch: number of the micro-batch, or None outside of micro-batches.
        wall_seconds: wall time.
        busy_seconds: processor time of the thread.
        event: CUDA event on the stream, or None on CPU.
    """

    kind: str
    micro_batch: int | None
    wall_seconds: float
    busy_seconds: float
    event: torch.cuda.Event | None

    def stream_seconds(self, following: Mark) -> float:
        """Return the seconds to a later mark on the CUDA stream. The stream must have passed both marks."""
        assert self.event is not None and following.event is not None
        return float(self.event.elapsed_time(following.event)) / 1000


class StepClock:
    """Times the phases of one step.

    On CPU the work of a rank is its thread's processor time, which excludes waiting for other ranks or for a core. On
    CUDA it is the time between events on the stream. Within a step the host never waits for the device.
    """

    def __init__(self, on_cuda: bool, busy_time: Callable[[], float] = time.thread_time) -> None:
        """Create a clock; ``busy_time`` returns the processor time in seconds."""
        self.on_cuda = on_cuda
        self.busy_time = busy_time
        self.traced = False
        self.marks: list[Mark] = []

    def begin(self, traced: bool) -> None:
        """Start a step. Before a ``traced`` step on CUDA the host waits for the stream, to know its wall time."""
        self.traced = traced
        self.marks.clear()
        self.mark("wait")
        if traced and (event := self.marks[0].event) is not None:
            event.synchronize()
            self.marks[0] = replace(self.marks[0], wall_seconds=time.time())

    def mark(self, kind: str, micro_batch: int | None = None) -> None:
        """End the current phase and start a phase of ``kind``, one of ``timeline.KINDS``."""
        event = None
        if self.on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append(Mark(kind, micro_batch, time.time(), self.busy_time(), event))

    def work_seconds(self) -> float:
        """Return the seconds of forward and backward passes. On CPU they exclude waiting for rings."""
        work = self._mark_pairs("forward", "backward")
        if not self.on_cuda:
            return sum(following.busy_seconds - mark.busy_seconds for mark, following in work)
        if work and (last := work[-1][1].event) is not None:
            last.synchronize()
        return sum(mark.stream_seconds(following) for mark, following in work)

    def pass_span(self) -> float:
        """Return the seconds from the first forward to the last backward pass: wall time on CPU, stream time on CUDA.

        On CUDA call ``work_seconds`` first, which waits until the stream has passed all marks.
        """
        work = self._mark_pairs("forward", "backward")
        if not work:
            return 0.0
        first, last = work[0][0], work[-1][1]
        return first.stream_seconds(last) if self.on_cuda else last.wall_seconds - first.wall_seconds

    def backward_seconds(self) -> dict[int, float]:
        """Return ``pass_seconds`` of the backward passes."""
        return self.pass_seconds("backward")

    def pass_seconds(self, kind: str) -> dict[int, float]:
        """Return the seconds of the phases of a kind by micro-batch: wall time on CPU, stream time on CUDA.

        On CUDA call ``work_seconds`` first, which waits until the stream has passed all marks.
        """
        totals: dict[int, float] = {}
        for mark, following in self._mark_pairs(kind):
            if mark.micro_batch is not None:
                wall = following.wall_seconds - mark.wall_seconds
                seconds = mark.stream_seconds(following) if self.on_cuda else wall
                totals[mark.micro_batch] = totals.get(mark.micro_batch, 0.0) + seconds
        return totals

    def _mark_pairs(self, *kinds: str) -> list[tuple[Mark, Mark]]:
        """Return (first mark, mark that ended the phase) of each phase of these kinds."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [(mark, following) for mark, following in pairs if mark.kind in kinds]

    def phases(self, step: int, rank: int, micro_batches: Sequence[MicroBatch], lengths: Sequence[int]) -> list[Phase]:
        """Return the phases of a traced step. On CUDA wait until the stream has passed all marks.

        Args:
            step: number of the step.
            rank: number of this rank.
            micro_batches: micro-batches of this rank.
            lengths: lengths of the step's sequences.
        """
        first, last = self.marks[0], self.marks[-1]
        if last.event is not None:
            last.event.synchronize()
        phases = []
        for mark, following in zip(self.marks, self.marks[1:], strict=False):
            known = mark.micro_batch is not None and mark.micro_batch < len(micro_batches)
            shards = micro_batches[mark.micro_batch or 0].shards if known else ()
            parts = tuple(PhaseShard(s.seq, lengths[s.seq], s.num_tokens, s.ring) for s in shards)
            start, stop = mark.wall_seconds, following.wall_seconds
            if last.event is not None:
                start, stop = (first.wall_seconds + first.stream_seconds(end) for end in (mark, following))
            phases.append(Phase(step, rank, mark.kind, mark.micro_batch, start, stop, parts))
        return phases


@dataclass(frozen=True)
class RankStep:
    """Metrics of one HDP rank for one step. The sum of steps adds all fields except peaks, which are maxima."""

    work_seconds: float = 0.0
    planned_work: float = 0.0
    num_micro_batches: float = 0.0
    num_tokens: float = 0.0
    num_rows: float = 0.0
    plan_wait_seconds: float = 0.0
    bytes_sent: float = 0.0
    attention_calls: float = 0.0
    kept_bytes: float = 0.0
    swapped_bytes: float = 0.0
    recomputed_bytes: float = 0.0
    host_peak_bytes: float = 0.0
    num_slices: float = 0.0
    device_peak_bytes: float = 0.0
    pass_seconds: float = 0.0
    rows_read: float = 0.0
    rows_fetched: float = 0.0
    updates_lacking: float = 0.0

    def __add__(self, other: RankStep) -> RankStep:
        sums = RankStep(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))
        return replace(
            sums,
            host_peak_bytes=max(self.host_peak_bytes, other.host_peak_bytes),
            device_peak_bytes=max(self.device_peak_bytes, other.device_peak_bytes),
        )

    def values(self) -> tuple[float, ...]:
        """Return the values of the fields in order."""
        return tuple(asdict(self).values())

    @classmethod
    def of_stages(cls, stages: Sequence[RankStep]) -> RankStep:
        """Combine the metrics of pipeline stages: counts are equal on all stages, work, traffic and memory are summed,
        waiting times and peaks are maxima."""
        return replace(
            stages[0],
            work_seconds=sum(stage.work_seconds for stage in stages),
            plan_wait_seconds=max(stage.plan_wait_seconds for stage in stages),
            bytes_sent=sum(stage.bytes_sent for stage in stages),
            attention_calls=sum(stage.attention_calls for stage in stages),
            kept_bytes=sum(stage.kept_bytes for stage in stages),
            swapped_bytes=sum(stage.swapped_bytes for stage in stages),
            recomputed_bytes=sum(stage.recomputed_bytes for stage in stages),
            host_peak_bytes=max(stage.host_peak_bytes for stage in stages),
            device_peak_bytes=max(stage.device_peak_bytes for stage in stages),
            pass_seconds=max(stage.pass_seconds for stage in stages),
            rows_read=sum(stage.rows_read for stage in stages),
            rows_fetched=sum(stage.rows_fetched for stage in stages),
            updates_lacking=sum(stage.updates_lacking for stage in stages),
        )


@dataclass(frozen=True)
class IntervalMetrics:
    """Figures of all HDP ranks for one log interval.

    Attributes:
        iteration: last iteration of the interval.
        num_steps: number of steps in the interval.
        tokens_per_second: real tokens, without padding, over wall time.
        micro_batches_per_rank: mean number of micro-batches per step, for each rank.
        planned_imbalance: planned work of the busiest rank over the mean of all ranks.
        measured_imbalance: measured work of the busiest rank over the mean of all ranks; processor time on CPU, time
            from the first forward pass to the gradient reduction on a GPU, waiting in rings included.
        padding_share: share of rows that are padding for sequence parallelism or FP8.
        plan_wait_ms: longest wait of a rank for its plan, in milliseconds per step.
        megabytes_sent_per_step: keys, values and gradients sent in rings, summed over all ranks.
        attention_calls_per_step: calls of the attention kernel, summed over all ranks.
        kept_megabytes_per_step: activations that the activation policy kept on the device, summed over all ranks.
        swapped_megabytes_per_step: activations that the policy moved to host memory, summed over all ranks.
        recomputed_megabytes_per_step: activations that the policy recomputed, summed over all ranks.
        host_peak_megabytes: highest host memory for activations in one process since the start.
        slices_per_micro_batch: mean number of slices per micro-batch.
        stragglers: ranks that take longer than the others for equal work.
        device_peak_megabytes: peak device memory of one process, model states included, in ``--hdp-memory-step``.
        active_experts: mean number of experts per token while a dense-to-sparse gate anneals.
        stale_steps: mean number of steps whose gradients the parameters lacked, with ``--state-update-steps``.
        most_stale_steps: largest number of such steps in the interval.
        table_hit_rate: share of the rows that steps read from tables in host memory (``--host-tables``) and did not
            fetch.
        table_staleness: mean number of updates of other ranks that these rows lacked.
        predicted_over_measured: predicted over measured time of the steps; seconds outside of passes are predicted from
            earlier intervals.
    """

    iteration: int
    num_steps: int
    tokens_per_second: float
    micro_batches_per_rank: tuple[float, ...]
    planned_imbalance: float
    measured_imbalance: float
    padding_share: float
    plan_wait_ms: float
    megabytes_sent_per_step: float
    attention_calls_per_step: float
    kept_megabytes_per_step: float = 0.0
    swapped_megabytes_per_step: float = 0.0
    recomputed_megabytes_per_step: float = 0.0
    host_peak_megabytes: float = 0.0
    slices_per_micro_batch: float = 1.0
    stragglers: tuple[Straggler, ...] = ()
    device_peak_megabytes: float = 0.0
    active_experts: float = 0.0
    stale_steps: float = 0.0
    most_stale_steps: float = 0.0
    table_hit_rate: float = 0.0
    table_staleness: float = 0.0
    predicted_over_measured: float = 0.0

    @classmethod
    def of(cls, iteration: int, num_steps: int, seconds: float, ranks: Sequence[RankStep]) -> IntervalMetrics:
        """Combine the metrics of all ranks, each summed over the interval.

        Args:
            iteration: number of the last step.
            num_steps: number of steps in the interval.
            seconds: wall time of the interval.
            ranks: metrics of each HDP rank.
        """
        rows = sum(rank.num_rows for rank in ranks)
        tokens = sum(rank.num_tokens for rank in ranks)
        table_rows = sum(rank.rows_read for rank in ranks)
        return cls(
            iteration=iteration,
            num_steps=num_steps,
            tokens_per_second=tokens / max(seconds, 1e-9),
            micro_batches_per_rank=tuple(round(rank.num_micro_batches / num_steps, 2) for rank in ranks),
            planned_imbalance=_imbalance(rank.planned_work for rank in ranks),
            measured_imbalance=_imbalance(rank.work_seconds for rank in ranks),
            padding_share=(rows - tokens) / rows if rows else 0.0,
            plan_wait_ms=1000 * max(rank.plan_wait_seconds for rank in ranks) / num_steps,
            megabytes_sent_per_step=sum(rank.bytes_sent for rank in ranks) / num_steps / 1e6,
            attention_calls_per_step=sum(rank.attention_calls for rank in ranks) / num_steps,
            kept_megabytes_per_step=sum(rank.kept_bytes for rank in ranks) / num_steps / 1e6,
            swapped_megabytes_per_step=sum(rank.swapped_bytes for rank in ranks) / num_steps / 1e6,
            recomputed_megabytes_per_step=sum(rank.recomputed_bytes for rank in ranks) / num_steps / 1e6,
            host_peak_megabytes=max(rank.host_peak_bytes for rank in ranks) / 1e6,
            slices_per_micro_batch=max(1.0, ranks[0].num_slices / num_steps),
            device_peak_megabytes=max(rank.device_peak_bytes for rank in ranks) / 1e6,
            table_hit_rate=1 - sum(rank.rows_fetched for rank in ranks) / table_rows if table_rows else 0.0,
            table_staleness=sum(rank.updates_lacking for rank in ranks) / table_rows if table_rows else 0.0,
        )

    def scalars(self) -> dict[str, float]:
        """Return the float metrics by name, except metrics that still have their default: their feature is off."""
        off = {
            entry.name
            for entry in fields(self)
            if entry.default is not MISSING and getattr(self, entry.name) == entry.default
        }
        return {name: value for name, value in asdict(self).items() if isinstance(value, float) and name not in off}

    def line(self) -> str:
        """Return the log line."""
        counts = " ".join(f"{count:g}" for count in self.micro_batches_per_rank[:16])
        more = f" ... ({len(self.micro_batches_per_rank)} ranks)" if len(self.micro_batches_per_rank) > 16 else ""
        return (
            f" hdp: {self.tokens_per_second:,.0f} tokens/s | micro-batches per rank: {counts}{more} | "
            f"imbalance planned {self.planned_imbalance:.2f} measured {self.measured_imbalance:.2f} | "
            f"{self._predicted()}padding {100 * self.padding_share:.2f}% | "
            f"waited for plan {self.plan_wait_ms:.1f} ms | ring traffic {self.megabytes_sent_per_step:.1f} MB/step"
            f"{self._slices()}{self._activations()}{self._tables()}{self._peak()}"
        )

    def _predicted(self) -> str:
        ratio = self.predicted_over_measured
        return f"step time predicted/measured {ratio:{'.2f' if ratio >= 0.1 else '.2g'}} | " if ratio else ""

    def _slices(self) -> str:
        return f" | slices {self.slices_per_micro_batch:.3g}" if self.slices_per_micro_batch > 1 else ""

    def _activations(self) -> str:
        parts = self.kept_megabytes_per_step, self.swapped_megabytes_per_step, self.recomputed_megabytes_per_step
        return f" | {activations_text(*parts, self.host_peak_megabytes)}" if any(parts) else ""

    def _tables(self) -> str:
        if not self.table_hit_rate and not self.table_staleness:
            return ""
        return f" | tables: {100 * self.table_hit_rate:.1f}% hits, rows lack {self.table_staleness:.2f} updates"

    def _peak(self) -> str:
        return f" | memory {self.device_peak_megabytes:,.1f} MB" if self.device_peak_megabytes else ""


def activations_text(kept: float, swapped: float, recomputed: float, host_peak: float) -> str:
    """Return the log text of an activation policy, in megabytes per step."""
    return (
        f"activations kept {kept:.1f} swapped {swapped:.1f} recomputed {recomputed:.1f} MB/step, host peak "
        f"{host_peak:.1f} MB"
    )


def _imbalance(work: Iterable[float]) -> float:
    values = list(work)
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0


def append_jsonl(path: Path, rows: Iterable[Mapping[str, object]], top: Path | None = None) -> None:
    """Append one JSON line per row, and create the folder if needed. NaN and infinity become null.

    ``top``: folder that the user named; None: the file's. Links below it are not followed.

    If the file cannot be written, for example on a full disk, print one warning per file and let training continue.
    """
    try:
        make_folder(path.parent, top or path.parent)
        with appended(path) as file:
            file.writelines(json.dumps(finite(row), allow_nan=False) + "\n" for row in rows)
    except OSError as error:
        if path not in _WARNED:
            print(f"warning: {path} is no longer written ({error.strerror}); training continues", file=sys.stderr)
            _WARNED.add(path)


_WARNED: set[Path] = set()
