"""Makes the plan of a step: checked, within a time limit, and in a separate process where planning is slow."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Protocol, cast, runtime_checkable

from bytescale_ext.errors import OutOfTime
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan

_SLOW_SECONDS = 0.05  # of processor time: a plan that takes longer moves planning to another process
_LOOK_SECONDS = 0.02  # between two calls of should_stop
_PACKAGES = Path(__file__).parents[3]


class Planner(Protocol):
    """Makes the plan of a step from its lengths: pure, equal on every rank (``plan.hdp.planner.HdpPlanner``)."""

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        """Return the plan; raise ``OutOfTime`` soon after ``should_stop`` returns True."""
        ...

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        """Return a simple plan of the same sequences, made at once."""
        ...


@runtime_checkable
class LoadedPlanner(Planner, Protocol):
    """A planner that counts with loads of experts."""

    def with_expert_imbalance(self, load: float) -> Planner:
        """Return the planner of a step in which the slowest rank's experts take ``load`` times the mean."""
        ...


@dataclass(frozen=True, slots=True)
class PlanMaker:
    """Makes the checked plan of a step from its lengths; takes the simple plan when time runs out.

    Attributes:
        planner: makes the plans.
        check: called with each plan, raises on a bad one; None: plans are trusted.
        plan_seconds: time limit of the planner for one step; None: no limit.
    """

    planner: Planner
    check: Callable[[StepPlan], None] | None = check_step_plan
    plan_seconds: float | None = None

    def with_expert_imbalance(self, load: float) -> PlanMaker:
        """Return what makes the plans of a step with this load of experts; 1 changes nothing."""
        return replace(self, planner=planner_at(self.planner, load))

    def __call__(self, lengths: tuple[int, ...]) -> tuple[StepPlan, bool]:
        """Return the checked plan of a step, and whether it is the simple one because time ran out."""
        if self.plan_seconds is None:
            return self._checked(self.planner(lengths), lengths), False
        deadline = time.perf_counter() + self.plan_seconds
        try:
            return self._checked(self.planner(lengths, lambda: time.perf_counter() > deadline), lengths), False
        except OutOfTime:
            return self.simple(lengths)

    def simple(self, lengths: tuple[int, ...]) -> tuple[StepPlan, bool]:
        """Return the simple plan of a step, and True."""
        return self._checked(self.planner.fallback(lengths), lengths), True

    def _checked(self, plan: StepPlan, lengths: tuple[int, ...]) -> StepPlan:
        if self.check is not None:
            self.check(plan)
        assert tuple(plan.lengths) == lengths, f"a plan of other sequences: {plan.lengths=} {lengths=}"
        return plan


def without_tables(plan: StepPlan) -> StepPlan:
    """Return the plan without the tables that it has computed from its arrays: small enough to send or to save."""
    return replace(plan, ranks=replace(plan.ranks)) if isinstance(plan.ranks, PlacedRanks) else plan


class PlannerInProcess:
    """A ``Planner`` that moves to a separate process once a plan was slow. Its plans stay the same.

    Python runs one thread at a time: while the loader's thread plans, the training thread launches its kernels several
    times slower. If the process dies, the thread makes the plan.
    """

    def __init__(self, planner: Planner, slow_seconds: float = _SLOW_SECONDS) -> None:
        """``planner`` can be pickled; a plan of more than ``slow_seconds`` of processor time starts the process."""
        self._planner = planner
        self._slow_seconds = slow_seconds
        self._is_slow = False
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., PlannerInProcess] | None = None

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        """See ``Planner``; raises the planner's own errors."""
        return self.plan(lengths, should_stop)

    def with_expert_imbalance(self, load: float) -> Planner:
        """See ``LoadedPlanner``: the same process makes the plans of all loads."""
        return _AtLoad(self, load)

    def plan(
        self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None, load: float = 1.0
    ) -> StepPlan:
        """Return the plan of a step with this load of experts; raises the planner's own errors."""
        planner = planner_at(self._planner, load)
        if not self._is_slow:
            began = time.thread_time()
            try:
                return planner(lengths, should_stop)
            finally:
                self._is_slow = time.thread_time() - began > self._slow_seconds
        try:
            answer = self._ask((tuple(lengths), load), should_stop)
        except (OSError, EOFError, pickle.UnpicklingError):  # the process has ended
            if self._end is not None and not self._end.alive:  # the interpreter ends too
                raise
            self._close()
            return planner(lengths, should_stop)
        if isinstance(answer, Exception):
            raise answer
        return cast(StepPlan, answer)

    def fallback(self, lengths: Sequence[int], load: float = 1.0) -> StepPlan:
        """See ``Planner``."""
        return planner_at(self._planner, load).fallback(lengths)

    def _ask(self, step: tuple[tuple[int, ...], float], should_stop: Callable[[], bool] | None) -> object:
        process = self._process or self._start()
        requests, answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        pickle.dump(step, requests, pickle.HIGHEST_PROTOCOL)
        requests.flush()
        while should_stop is not None and not select.select([answers], [], [], _LOOK_SECONDS)[0]:
            if should_stop():
                self._close()  # the next plan must not wait for this one
                raise OutOfTime("the planner was told to stop")
        return pickle.load(answers)

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "bytescale_ext.data.loading.plan_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C must not reach it; it ends with its input
        )
        self._end = weakref.finalize(self, _end, process)
        pickle.dump(self._planner, cast(IO[bytes], process.stdin), pickle.HIGHEST_PROTOCOL)
        return process

    def _close(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


@dataclass(frozen=True, slots=True)
class _AtLoad:
    """A ``Planner`` in a process, of a step with this load of experts."""

    process: PlannerInProcess
    load: float

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        return self.process.plan(lengths, should_stop, self.load)

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        return self.process.fallback(lengths, self.load)


def planner_at(planner: Planner, load: float) -> Planner:
    """Return the planner of a step with this load of experts; 1 asks nothing of a planner."""
    if load == 1.0:
        return planner
    assert isinstance(planner, LoadedPlanner), f"{planner=} {load=}"
    return planner.with_expert_imbalance(load)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
