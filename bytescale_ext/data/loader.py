"""Steps planned and read ahead of training, in a background thread.

::

    sample ids -> lengths -> planner -> check -> tokens of this rank --(at most plan_ahead steps)--> next()
    \\______________________ background thread _____________________/

No communication: every rank makes the same plan of the same lengths, and reads its own tokens of it.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from bytescale_ext.data.packed import PackedMicroBatch, TokenSource
from bytescale_ext.data.planning import Planner, plan_in_time
from bytescale_ext.data.units import units_of
from bytescale_ext.plan.check import check_step_plan
from bytescale_ext.plan.document_slices import SliceRule
from bytescale_ext.plan.shapes import StepPlan

_JOIN_SECONDS = 10.0


@dataclass(frozen=True, eq=False, slots=True)
class StepBatch:
    """One optimizer step of one rank.

    Attributes:
        step_index: number of the step, counted from the loader's ``first_step``.
        sample_ids: samples of the step on all ranks, in order; entry ``seq`` is the plan's sequence ``seq``.
        lengths: tokens of each.
        plan: the plan of all ranks.
        micro_batches: those of this rank, or their slices, in running order; none when the plan gives it none.
        num_tokens: tokens of the step on all ranks.
        plan_seconds: time for lengths, plan and check, in the background.
        read_seconds: time for reading and packing this rank's tokens, in the background.
        wait_seconds: time for which ``next()`` waited.
        fell_back: the planner ran out of its time, and this is its simple plan.
        simple: makes the same step by the simple plan, for when another rank's planner ran out of its time.
    """

    step_index: int
    sample_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    plan: StepPlan
    micro_batches: tuple[PackedMicroBatch, ...]
    num_tokens: int
    plan_seconds: float
    read_seconds: float
    wait_seconds: float
    fell_back: bool = False
    simple: Callable[[], StepBatch] | None = None


class StepMaker(Protocol):
    """All that makes a step out of a number of consumed samples."""

    def sample_ids(self, consumed_samples: int) -> tuple[int, ...] | None:
        """The next step's samples, None when there are not enough left."""
        ...

    def step(self, step_index: int, sample_ids: tuple[int, ...], should_stop: Callable[[], bool]) -> StepBatch:
        """Plan one step and read this rank's part of it. Where that can wait, raises soon after ``should_stop``."""
        ...


def next_samples(
    consumed_samples: int, samples_per_step: int | Callable[[int], int], size: int, cyclic: bool
) -> tuple[int, ...] | None:
    """Samples of the step after ``consumed_samples`` of a source of ``size``; None when there are not enough left."""
    count = samples_per_step if isinstance(samples_per_step, int) else samples_per_step(consumed_samples)
    if count < 1:
        raise ValueError(f"{count} samples per step after {consumed_samples} samples: give at least 1")
    ids = range(consumed_samples, consumed_samples + count)
    if cyclic:
        return tuple(i % size for i in ids)
    return tuple(ids) if ids.stop <= size else None


@dataclass(frozen=True, slots=True)
class _Failure:
    """What ended the thread: the error to raise in ``next()``, ``StopIteration`` at the end of the data."""

    error: BaseException


@dataclass(frozen=True, eq=False, slots=True)
class _Recipe:
    """A ``StepMaker`` that reads from a source in this process."""

    source: TokenSource
    planner: Planner
    rank: int
    samples_per_step: int | Callable[[int], int]
    rows_multiple: int
    check: Callable[[StepPlan], None] | None
    vocab_size: int | None
    cyclic: bool
    pin_memory: bool
    plan_seconds: float | None
    slice_rule: SliceRule | None

    def sample_ids(self, consumed_samples: int) -> tuple[int, ...] | None:
        return next_samples(consumed_samples, self.samples_per_step, len(self.source), self.cyclic)

    def plan(self, lengths: tuple[int, ...], simple: bool) -> tuple[StepPlan, bool]:
        """The plan, and whether it is the simple one because the planner ran out of its time."""
        if simple:
            return self.planner.fallback(lengths), True
        return plan_in_time(self.planner, lengths, self.plan_seconds)

    def step(
        self,
        step_index: int,
        sample_ids: tuple[int, ...],
        should_stop: Callable[[], bool] = bool,
        simple: bool = False,
    ) -> StepBatch:
        """Plan one step and read this rank's part of it. Never waits, so it does not ask ``should_stop``."""
        began = time.perf_counter()
        lengths = tuple(self.source.length(i) for i in sample_ids)
        plan, fell_back = self.plan(lengths, simple)
        if self.check is not None:
            self.check(plan)
        assert tuple(plan.lengths) == lengths, f"a plan of other sequences: {plan.lengths=} {lengths=}"
        assert 0 <= self.rank < plan.num_ranks, f"{self.rank=} {plan.num_ranks=}"
        planned = time.perf_counter()
        units = units_of(plan.ranks[self.rank], lengths, self.rank, self.rows_multiple, self.slice_rule)
        packed = (unit.read(self.source, sample_ids, lengths, self.vocab_size) for unit in units)
        micro_batches = tuple(one.pinned() if self.pin_memory else one for one in packed)
        return StepBatch(
            step_index=step_index,
            sample_ids=sample_ids,
            lengths=lengths,
            plan=plan,
            micro_batches=micro_batches,
            num_tokens=sum(lengths),
            plan_seconds=planned - began,
            read_seconds=time.perf_counter() - planned,
            wait_seconds=0.0,
            fell_back=fell_back,
            simple=None if fell_back else partial(self.step, step_index, sample_ids, simple=True),
        )


@dataclass(frozen=True, eq=False, slots=True)
class _Line:
    """What the thread and its consumer share. Holds no loader, so that a dropped loader can be collected.

    Attributes:
        free: one permit for each step that may still be made ahead.
        ready: made steps in order, last of all a failure.
        stop: set when nobody waits any more.
    """

    free: threading.Semaphore
    ready: queue.SimpleQueue[StepBatch | _Failure]
    stop: threading.Event


class StepsAhead(Iterator[StepBatch]):
    """Iterator over the steps of a ``StepMaker``, made in a background thread up to ``plan_ahead`` steps early.

    ``next()`` raises what the maker raised, with its own type, after the good steps before it, and again each time;
    ``StopIteration`` where the maker has no samples for another step.

    Raises:
        ValueError: ``plan_ahead`` below 1 or ``consumed_samples`` negative.
    """

    def __init__(self, maker: StepMaker, plan_ahead: int, consumed_samples: int, first_step: int) -> None:
        if plan_ahead < 1:
            raise ValueError(f"plan_ahead {plan_ahead}: at least one step must be made ahead, give 1 or more")
        self._maker = maker
        self._plan_ahead = plan_ahead
        self._failure: _Failure | None = None
        self._start(consumed_samples, first_step)

    def __iter__(self) -> StepsAhead:
        return self

    def __next__(self) -> StepBatch:
        if self._failure is None:
            began = time.perf_counter()
            item = self._line.ready.get()
            waited = time.perf_counter() - began
            if isinstance(item, StepBatch):
                self._line.free.release()
                self._consumed_samples += len(item.sample_ids)
                self._next_step = item.step_index + 1
                return replace(item, wait_seconds=waited)
            self._failure = item
        raise self._failure.error

    def state_dict(self) -> dict[str, int]:
        """Where the next step begins, steps made ahead and not handed out left aside."""
        return {"consumed_samples": self._consumed_samples, "step_index": self._next_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there; steps made ahead are thrown away."""
        self.close()
        self._start(int(state["consumed_samples"]), int(state["step_index"]))

    def close(self) -> None:
        """Stop the thread and wait for it; ``next()`` raises ``RuntimeError`` from now on. May be called twice."""
        self._shutdown()
        self._failure = _Failure(RuntimeError("the loader is closed"))

    def _start(self, consumed_samples: int, first_step: int) -> None:
        if consumed_samples < 0:
            raise ValueError(f"consumed_samples {consumed_samples}: give 0 or more")
        self._consumed_samples, self._next_step = consumed_samples, first_step
        self._failure = None
        self._line: _Line = _Line(threading.Semaphore(self._plan_ahead), queue.SimpleQueue(), threading.Event())
        thread = threading.Thread(
            target=_make_steps,
            args=(self._maker, self._line, consumed_samples, first_step),
            name="bytescale-loader",
            daemon=True,
        )
        thread.start()
        # Runs once: in close(), when the loader is collected, or before the interpreter ends.
        self._shutdown = weakref.finalize(self, _stop, self._line, thread)


class StepLoader(StepsAhead):
    """Iterator over steps. The order depends on the source and ``consumed_samples`` alone.

    Args:
        source: samples; on all ranks the same.
        planner: makes the plans.
        rank: HDP rank whose micro-batches are read.
        consumed_samples: samples used before: the first step begins with this one.
        samples_per_step: samples of one step on all ranks, or a function from the samples consumed before the
            step to that number (batch size ramp-up).
        rows_multiple: rows of each micro-batch are padded to a multiple of this.
        plan_ahead: steps made before they are asked for, at least 1.
        check: called with each plan, raises on a bad one; None: plans are trusted.
        vocab_size: token ids must be below it; None: not checked.
        cyclic: at the end of the source begin again (evaluation) instead of stopping.
        pin_memory: keep micro-batches in page-locked memory (CUDA).
        first_step: ``step_index`` of the first step.
        plan_seconds: time that the planner has for one step; then its simple plan is taken. Ranks may differ in
            this, so they must agree before they run a step (``StepBatch.fell_back``). None: it takes its time.
        slice_rule: how micro-batches are cut into slices; None: they are not.

    ``next()`` raises what the source, the planner or the check raised, with its own type, after the good steps
    before it, and again each time. Where fewer samples are left than a step needs, it raises ``StopIteration``.

    Raises:
        ValueError: ``plan_ahead`` below 1, ``consumed_samples`` negative, or a cyclic source without samples.
    """

    def __init__(
        self,
        source: TokenSource,
        planner: Planner,
        rank: int,
        *,
        consumed_samples: int = 0,
        samples_per_step: int | Callable[[int], int],
        rows_multiple: int = 1,
        plan_ahead: int = 2,
        check: Callable[[StepPlan], None] | None = check_step_plan,
        vocab_size: int | None = None,
        cyclic: bool = False,
        pin_memory: bool = False,
        first_step: int = 0,
        plan_seconds: float | None = None,
        slice_rule: SliceRule | None = None,
    ) -> None:
        if cyclic and len(source) == 0:
            raise ValueError("a data set without samples cannot be repeated: give one with documents")
        recipe = _Recipe(
            source, planner, rank, samples_per_step, rows_multiple, check, vocab_size, cyclic, pin_memory, plan_seconds,
            slice_rule,
        )  # fmt: skip
        super().__init__(recipe, plan_ahead, consumed_samples, first_step)


def _make_steps(maker: StepMaker, line: _Line, consumed_samples: int, step_index: int) -> None:
    """Body of the thread: make steps while there is room, until the data ends, an error, or ``stop``."""
    try:
        while True:
            line.free.acquire()
            if line.stop.is_set():
                return
            sample_ids = maker.sample_ids(consumed_samples)
            if sample_ids is None:
                raise StopIteration
            line.ready.put(maker.step(step_index, sample_ids, line.stop.is_set))
            consumed_samples += len(sample_ids)
            step_index += 1
    except BaseException as error:  # handed to next(), which raises it
        line.ready.put(_Failure(error))


def _stop(line: _Line, thread: threading.Thread) -> None:
    line.stop.set()
    line.free.release()
    line.ready.put(_Failure(RuntimeError("the loader is closed")))
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
