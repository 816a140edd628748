"""Planning of a step: with a check and a time limit, and in a separate process if planning is slow."""

from __future__ import annotations

import os
import pickle
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, BinaryIO, Protocol, cast, runtime_checkable

import numpy as np

from bytescale_ext.data.loading.plan_pipe import receive
from bytescale_ext.data.samples.length_reader import StepLengths
from bytescale_ext.errors import OutOfTime
from bytescale_ext.plan.cost.learned import UNLEARNED, LearnedCosts
from bytescale_ext.plan.setup.forecast import StepTime
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.numbers import Numbers
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import Fact, StepPlan

_SLOW_SECONDS = 0.05  # processor time of a plan above which planning moves to another process
_POLL_SECONDS = 0.02  # between two calls of should_stop
_PACKAGES = Path(__file__).parents[3]


class Planner(Protocol):
    """Computes the plan of a step from its lengths, equally on every rank (``plan.hdp.planner.HdpPlanner``)."""

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        """Return the plan. Raises ``OutOfTime`` soon after ``should_stop`` returns True."""
        ...

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        """Return a simple plan of the same sequences, without a search."""
        ...


@runtime_checkable
class LoadedPlanner(Planner, Protocol):
    """A planner that takes the imbalance of experts into account."""

    def with_expert_imbalance(self, load: float) -> Planner:
        """Return the planner of a step. The experts of its slowest rank take ``load`` times the mean."""
        ...


@runtime_checkable
class LearningPlanner(Planner, Protocol):
    """A planner that takes learned costs into account."""

    def with_costs(self, learned: LearnedCosts) -> Planner:
        """Return the planner with learned costs and speeds of ranks."""
        ...


type Predict = Callable[[StepPlan, LearnedCosts], StepTime]


@dataclass(frozen=True, slots=True)
class PredictedTime:
    """Fact of a plan: the predicted time of its step.

    Attributes:
        predict: function from a plan and learned costs to the time, equal for all plans of a run.
        learned: learned costs.
    """

    predict: Predict
    learned: LearnedCosts = UNLEARNED

    @property
    def key(self) -> Hashable:
        """See ``Fact``."""
        return PredictedTime, self.learned

    def __call__(self, plan: StepPlan) -> StepTime:
        """Return the time."""
        return self.predict(plan, self.learned)


@dataclass(frozen=True, slots=True)
class PlanMaker:
    """Makes the checked plan of a step from its lengths, or the simple plan if time runs out.

    Attributes:
        planner: planner of the steps.
        check: function that raises an error for an invalid plan; None trusts all plans.
        plan_seconds: time limit for one plan; None for no limit.
        predict: function from a plan and learned costs to the time of the step; None: nothing is predicted.
        learned: learned costs of the plans.
    """

    planner: Planner
    check: Callable[[StepPlan], None] | None = check_step_plan
    plan_seconds: float | None = None
    predict: Predict | None = None
    learned: LearnedCosts = UNLEARNED

    def with_expert_imbalance(self, load: float) -> PlanMaker:
        """Return the maker of plans for a step with this imbalance of experts."""
        return replace(self, planner=planner_at(self.planner, load))

    def with_costs(self, learned: LearnedCosts) -> PlanMaker:
        """Return the maker of plans with learned costs; a planner that takes none plans with its own."""
        if learned == UNLEARNED or not isinstance(self.planner, LearningPlanner):
            return self
        return replace(self, planner=self.planner.with_costs(learned), learned=learned)

    def predicted(self, plan: StepPlan) -> StepTime | None:
        """Return the predicted time of a planned step; None if nothing is predicted."""
        return None if self.predict is None else plan.fact(PredictedTime(self.predict, self.learned))

    def __call__(self, lengths: Sequence[int]) -> tuple[StepPlan, bool]:
        """Return the checked plan of a step, and whether it is the simple plan because time ran out."""
        if self.plan_seconds is None:
            return self._checked(self.planner(lengths), lengths), False
        deadline = time.perf_counter() + self.plan_seconds
        try:
            return self._checked(self.planner(lengths, lambda: time.perf_counter() > deadline), lengths), False
        except OutOfTime:
            return self.simple(lengths)

    def simple(self, lengths: Sequence[int]) -> tuple[StepPlan, bool]:
        """Return the simple plan of a step, and True."""
        return self._checked(self.planner.fallback(lengths), lengths), True

    def _checked(self, plan: StepPlan, lengths: Sequence[int]) -> StepPlan:
        if self.check is not None:
            self.check(plan)
        if not isinstance(lengths, StepLengths) or lengths.is_read:
            assert np.array_equal(plan.lengths, lengths), f"a plan of other sequences: {plan.lengths=} {lengths=}"
        return plan


@dataclass(frozen=True, slots=True)
class CheckedPlanner:
    """A ``Planner`` that checks its plans and computes the parts that a rank reads. Another process can run it.

    Attributes:
        planner: planner of the steps.
        check: function that raises an error for an invalid plan.
        rank: HDP rank whose micro-batches the plan holds.
        facts: facts that its plans keep.
        predict: function that predicts the time of the step, which is one more fact; None: nothing is predicted.
        learned: learned costs of the plans.
    """

    planner: Planner
    check: Callable[[StepPlan], None]
    rank: int
    facts: tuple[Fact[object], ...] = ()
    predict: Predict | None = None
    learned: LearnedCosts = UNLEARNED

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        """See ``Planner``; raises the planner's own errors, and ``PlanError`` for an invalid plan."""
        return self._checked(self.planner(lengths, should_stop))

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        """See ``Planner``."""
        return self._checked(self.planner.fallback(lengths))

    def with_expert_imbalance(self, load: float) -> Planner:
        """See ``LoadedPlanner``."""
        return replace(self, planner=planner_at(self.planner, load))

    def with_costs(self, learned: LearnedCosts) -> Planner:
        """See ``LearningPlanner``."""
        return replace(self, planner=planner_at(self.planner, 1.0, learned), learned=learned)

    def _checked(self, plan: StepPlan) -> StepPlan:
        self.check(plan)
        if isinstance(plan.ranks, PlacedRanks):
            _ = plan.ranks.counts, plan.ranks[self.rank], plan.digest(), plan.num_tokens  # the plan keeps them
        for fact in self.facts:
            plan.fact(fact)
        if self.predict is not None:
            plan.fact(PredictedTime(self.predict, self.learned))
        return plan


class PlannerInProcess:
    """A ``Planner`` that moves to a separate process after a slow plan, and returns the same plans there.

    Python runs one thread at a time. While the loader's thread plans, the training thread launches kernels several
    times slower. If the process dies, planning returns to the thread.
    """

    def __init__(self, planner: Planner, slow_seconds: float = _SLOW_SECONDS) -> None:
        """Wrap a planner that can be pickled.

        A plan that takes more than ``slow_seconds`` of processor time starts the process.
        """
        self._planner = planner
        self._slow_seconds = slow_seconds
        self._is_slow = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._end: weakref.finalize[..., PlannerInProcess] | None = None

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        """See ``Planner``; raises the planner's own errors."""
        return self.plan(lengths, should_stop)

    def with_expert_imbalance(self, load: float) -> Planner:
        """See ``LoadedPlanner``. One process plans for every imbalance."""
        return _UnderConditions(self, load)

    def with_costs(self, learned: LearnedCosts) -> Planner:
        """See ``LearningPlanner``. One process plans with all costs."""
        return _UnderConditions(self, learned=learned)

    def plan(
        self,
        lengths: Sequence[int],
        should_stop: Callable[[], bool] | None = None,
        load: float = 1.0,
        learned: LearnedCosts | None = None,
    ) -> StepPlan:
        """Return the plan of a step with this imbalance of experts and costs; raises the planner's own errors."""
        planner = planner_at(self._planner, load, learned)
        if not self._is_slow:
            began = time.thread_time()
            try:
                return planner(lengths, should_stop)
            finally:
                self._is_slow = time.thread_time() - began > self._slow_seconds
        try:
            wanted = lengths if isinstance(lengths, StepLengths) and not lengths.is_read else Numbers(lengths)
            answer = self._ask((wanted, load, learned), should_stop)
        except (OSError, EOFError, pickle.UnpicklingError):  # the process has ended
            if self._end is not None and not self._end.alive:  # the interpreter is exiting too
                raise
            self._close()
            return planner(lengths, should_stop)
        if isinstance(answer, Exception):
            raise answer
        return cast(StepPlan, answer)

    def fallback(self, lengths: Sequence[int], load: float = 1.0, learned: LearnedCosts | None = None) -> StepPlan:
        """See ``Planner``."""
        return planner_at(self._planner, load, learned).fallback(lengths)

    def _ask(self, step: tuple[object, ...], should_stop: Callable[[], bool] | None) -> object:
        process = self._process or self._start()
        requests, answers = cast(IO[bytes], process.stdin), cast(BinaryIO, process.stdout)
        pickle.dump(step, requests, pickle.HIGHEST_PROTOCOL)
        requests.flush()
        while should_stop is not None and not select.select([answers], [], [], _POLL_SECONDS)[0]:
            if should_stop():
                self._close()  # the next plan must not wait for this plan
                raise OutOfTime("the planner was told to stop")
        return receive(answers, cast(socket.socket, self._channel))

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
        self._channel, other = socket.socketpair()
        with other:
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", "bytescale_ext.data.loading.plan_worker", str(other.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C must not reach the process, which exits when its input ends
                pass_fds=(other.fileno(),),
            )
        self._end = weakref.finalize(self, _end, process, self._channel)
        pickle.dump(self._planner, cast(IO[bytes], process.stdin), pickle.HIGHEST_PROTOCOL)
        return process

    def _close(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._channel = self._end = None


@dataclass(frozen=True, slots=True)
class _UnderConditions:
    """Planner in a process, for steps with this imbalance of experts and these costs."""

    process: PlannerInProcess
    load: float = 1.0
    learned: LearnedCosts | None = None

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        return self.process.plan(lengths, should_stop, self.load, self.learned)

    def with_expert_imbalance(self, load: float) -> Planner:
        return replace(self, load=load)

    def with_costs(self, learned: LearnedCosts) -> Planner:
        return replace(self, learned=learned)

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        return self.process.fallback(lengths, self.load, self.learned)


def planner_at(planner: Planner, load: float, learned: LearnedCosts | None = None) -> Planner:
    """Return the planner for a step with this imbalance of experts and these costs.

    For an imbalance of 1 without learned costs any planner will do.
    """
    if learned is not None:
        assert isinstance(planner, LearningPlanner), f"{planner=} {learned=}"
        planner = planner.with_costs(learned)
    if load == 1.0:
        return planner
    assert isinstance(planner, LoadedPlanner), f"{planner=} {load=}"
    return planner.with_expert_imbalance(load)


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    process.kill()
    process.communicate()
    channel.close()
