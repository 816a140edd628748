"""Loader that plans and reads steps ahead of training, in a background thread.

::

    sample ids -> lengths -> planner -> check -> tokens of this rank --(at most plan_ahead steps)--> next()
    \\______________________ background thread _____________________/

Ranks do not communicate: every rank computes the same plan from the same lengths, and reads its own tokens.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from bytescale_ext.data.loading.loads import LoadHistory
from bytescale_ext.data.loading.planning import PlanMaker
from bytescale_ext.data.loading.prompts import PlannedSequence, PromptSource, units_of_documents
from bytescale_ext.data.loading.step import LoaderSettings, StepBatch, StepMaker, samples_within
from bytescale_ext.data.samples.answers import PairSource
from bytescale_ext.data.samples.length_reader import ReadableSource, StepLengths
from bytescale_ext.data.samples.packed import TokenSource, lengths_of
from bytescale_ext.plan.cost.learned import LearnedCosts
from bytescale_ext.plan.step.numbers import Numbers
from bytescale_ext.plan.step.plan import StepPlan

_JOIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """Error that ended the thread and that ``next()`` raises; ``StopIteration`` at the end of the data."""

    error: BaseException


@dataclass(frozen=True, eq=False, slots=True)
class _Shared:
    """State shared by the thread and its consumer. It has no reference to the loader, so the loader can be collected.

    Attributes:
        free: one permit for each step that may still be prepared ahead.
        ready: prepared steps in order, followed by a failure.
        stop: event that is set when the loader is closed.
    """

    free: threading.Semaphore
    ready: queue.SimpleQueue[StepBatch | _Failure]
    stop: threading.Event


class StepsAhead(Iterator[StepBatch]):
    """Iterator over the steps of a ``StepMaker``, prepared in a background thread up to ``plan_ahead`` steps early.

    Any number of threads may call ``peek()`` while one calls ``next()``: a step is handed out once, in order.

    After an error ``next()`` first returns the steps prepared before it, and then raises the maker's error at every
    call. It raises ``StopIteration`` if the maker has no samples for another step.
    """

    def __init__(self, maker: StepMaker, settings: LoaderSettings) -> None:
        self._maker = maker
        self._plan_ahead = settings.plan_ahead
        self._failure: _Failure | None = None
        self._peeked: StepBatch | _Failure | None = None
        self._take = threading.Lock()  # held while a step is taken from the queue
        self._start(settings.consumed_samples, settings.first_step)

    def __iter__(self) -> StepsAhead:
        return self

    def __next__(self) -> StepBatch:
        if self._failure is None:
            began = time.perf_counter()
            with self._take:
                item, self._peeked = self._peeked or self._shared.ready.get(), None
            wait_seconds = time.perf_counter() - began
            if isinstance(item, StepBatch):
                self._shared.free.release()
                self._consumed_samples += len(item.sample_ids)
                self._next_step = item.step_index + 1
                return replace(item, wait_seconds=wait_seconds)
            self._failure = item
        raise self._failure.error

    def peek(self) -> StepBatch | None:
        """Wait for the step that ``next()`` will return, and return it; None if there is no further step.

        May be called in several threads.
        """
        with self._take:
            if self._failure is None and self._peeked is None:
                self._peeked = self._shared.ready.get()
            return self._peeked if isinstance(self._peeked, StepBatch) else None

    def simple_step(self, batch: StepBatch) -> StepBatch:
        """Return the step of ``batch`` with the simple plan, in case another rank's planner ran out of time."""
        return batch if batch.fell_back else self._maker.simple_step(batch)

    def state_dict(self) -> dict[str, int]:
        """Return the position of the next step. Steps prepared ahead count only after ``next()`` returned them."""
        return {"consumed_samples": self._consumed_samples, "step_index": self._next_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a state, and discard the steps prepared ahead."""
        self.close()
        self._start(int(state["consumed_samples"]), int(state["step_index"]))

    def close(self) -> None:
        """Stop the thread and wait for it. From now on ``next()`` raises ``RuntimeError``. May be called twice."""
        self._shutdown()
        self._failure = _Failure(RuntimeError("the loader is closed"))

    def _start(self, consumed_samples: int, first_step: int) -> None:
        self._consumed_samples, self._next_step = consumed_samples, first_step
        self._failure, self._peeked = None, None
        self._shared: _Shared = _Shared(threading.Semaphore(self._plan_ahead), queue.SimpleQueue(), threading.Event())
        thread = threading.Thread(
            target=_make_steps,
            args=(self._maker, self._shared, consumed_samples, first_step),
            name="bytescale-loader",
            daemon=True,
        )
        thread.start()
        # Runs once: in close(), when the loader is collected, or before the interpreter exits.
        self._shutdown = weakref.finalize(self, _stop, self._shared, thread)


class StepLoader(StepsAhead):
    """Iterator over the steps of a source in this process. The order depends only on the source and the settings.

    With a time limit for planning, some ranks may fall back to the simple plan and others not. So ranks must agree
    before they run a step (``StepBatch.fell_back``, ``simple_step``).

    Args:
        source: samples, equal on all ranks.
        plans: maker of plans.
        settings: selection of steps, and how they are read.
        sequences: function from the samples of a step to the sequences that a plan places, numbered as the source reads
            them; by default the samples themselves.
        loads: imbalance of experts in earlier steps, which plans take into account; None if it is not measured.
        costs: function from a step to the learned costs of its plan; None: nothing is learned.

    Raises:
        ValueError: a cyclic source has no samples.
    """

    def __init__(
        self,
        source: TokenSource,
        plans: PlanMaker,
        settings: LoaderSettings,
        sequences: Callable[[Sequence[int]], Sequence[int]] = Numbers,
        loads: LoadHistory | None = None,
        costs: Callable[[int], LearnedCosts] | None = None,
    ) -> None:
        if settings.cyclic and len(source) == 0:
            raise ValueError("a data set without samples cannot be repeated: give a data set with documents")
        super().__init__(_LocalSteps(source, plans, settings, sequences, loads, costs), settings)


@dataclass(frozen=True, eq=False, slots=True)
class _LocalSteps:
    """A ``StepMaker`` that reads from a source in this process."""

    source: TokenSource
    plans: PlanMaker
    settings: LoaderSettings
    sequences: Callable[[Sequence[int]], Sequence[int]]
    loads: LoadHistory | None
    costs: Callable[[int], LearnedCosts] | None

    def sample_ids(self, consumed_samples: int) -> Sequence[int] | None:
        num_tokens = self.settings.tokens_per_step
        if num_tokens is not None:
            return samples_within(num_tokens, consumed_samples, self.source)
        return self.settings.sample_ids(consumed_samples, len(self.source))

    def step(self, step_index: int, sample_ids: Sequence[int], should_stop: Callable[[], bool] = bool) -> StepBatch:
        """Plan one step and read this rank's part of it. Never waits, so ``should_stop`` is ignored."""
        return self._make(step_index, sample_ids)

    def simple_step(self, batch: StepBatch) -> StepBatch:
        return self._make(batch.step_index, batch.sample_ids, is_simple=True)

    def _plans_of(self, step_index: int) -> PlanMaker:
        plans = self.plans if self.costs is None else self.plans.with_costs(self.costs(step_index))
        return plans if self.loads is None else plans.with_expert_imbalance(self.loads.at(step_index))

    def _make(self, step_index: int, sample_ids: Sequence[int], is_simple: bool = False) -> StepBatch:
        began, plans = time.perf_counter(), self._plans_of(step_index)
        sequences = self.sequences(sample_ids)
        lengths = self._lengths(sequences)
        plan, fell_back = plans.simple(lengths) if is_simple else plans(lengths)
        groups = None
        if self.settings.prompts is not None and not fell_back:
            plan, fell_back, groups = self._with_prompts(plan, sequences, plans)
        planned = time.perf_counter()
        units = self.settings.units(plan)
        if groups is not None:
            units = units_of_documents(units, groups, plan, self.settings.rank)
        known = plan.lengths if groups is None else lengths
        micro_batches = self.settings.read(units, self.source, sequences, known)
        return StepBatch(
            step_index=step_index,
            sample_ids=sample_ids,
            plan=plan,
            micro_batches=micro_batches,
            plan_seconds=planned - began,
            read_seconds=time.perf_counter() - planned,
            fell_back=fell_back,
            references=self.source.reference_sums(sequences) if isinstance(self.source, PairSource) else None,
            predicted=plans.predicted(plan),
            shares_prompts=groups is not None,
        )

    def _lengths(self, sequences: Sequence[int]) -> Sequence[int]:
        """Return the lengths of sequences. The planner's process reads long steps itself, if it can."""
        source = self.source
        reader = source.length_reader() if isinstance(source, ReadableSource) else None
        return Numbers(lengths_of(source, sequences)) if reader is None else StepLengths(reader, sequences)

    def _with_prompts(
        self, copies: StepPlan, documents: Sequence[int], plans: PlanMaker
    ) -> tuple[StepPlan, bool, tuple[PlannedSequence, ...] | None]:
        """Return the plan of a step, whether it is the simple plan, and its sequences if prompts are computed once.

        ``copies``: plan of all ``documents`` of the step. If time runs out, the plan is the simple plan of all
        documents, as on ranks whose time ran out before.
        """
        prompts = self.settings.prompts
        assert prompts is not None, f"{self.settings=}"
        assert isinstance(self.source, PromptSource), f"{self.source=}"
        found: tuple[StepPlan, bool, tuple[PlannedSequence, ...] | None] = (copies, False, None)
        least = prompts.seconds(copies, None)
        for groups in prompts.choices(self.source, documents, copies.lengths):
            plan, fell_back = plans(Numbers([group.num_tokens for group in groups]))
            if fell_back:
                return (*plans.simple(copies.lengths), None)
            if prompts.can_run(plan, groups) and (seconds := prompts.seconds(plan, groups)) < least:
                found, least = (plan, False, groups), seconds
        return found


def _make_steps(maker: StepMaker, shared: _Shared, consumed_samples: int, step_index: int) -> None:
    """Run the thread: prepare steps until the data ends, an error occurs or the loader is closed."""
    try:
        while True:
            shared.free.acquire()
            if shared.stop.is_set():
                return
            sample_ids = maker.sample_ids(consumed_samples)
            if sample_ids is None:
                raise StopIteration
            shared.ready.put(maker.step(step_index, sample_ids, shared.stop.is_set))
            consumed_samples += len(sample_ids)
            step_index += 1
    except BaseException as error:  # next() raises it
        shared.ready.put(_Failure(error))


def _stop(shared: _Shared, thread: threading.Thread) -> None:
    shared.stop.set()
    shared.free.release()
    shared.ready.put(_Failure(RuntimeError("the loader is closed")))
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
