"""One plan of a step, in the time that it may take, and out of the way of the training."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol, cast

from bytescale_ext.errors import OutOfTime
from bytescale_ext.plan.shapes import StepPlan

_SLOW_SECONDS = 0.05  # of processor time: a plan that takes more is worth a process
_LOOK_SECONDS = 0.02  # between two looks at should_stop
_PACKAGES = Path(__file__).parents[2]


class Planner(Protocol):
    """From the lengths of a step to its plan: pure, equal on every rank (``plan.planner.HdpPlanner``)."""

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        """The plan; raises ``OutOfTime`` soon after ``should_stop`` says so."""
        ...

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        """A simple plan of the same sequences, made at once."""
        ...


def plan_in_time(planner: Planner, lengths: tuple[int, ...], plan_seconds: float | None) -> tuple[StepPlan, bool]:
    """The plan, and whether it is the simple one because the planner ran out of its time (None: no limit)."""
    if plan_seconds is None:
        return planner(lengths), False
    deadline = time.perf_counter() + plan_seconds
    try:
        return planner(lengths, lambda: time.perf_counter() > deadline), False
    except OutOfTime:
        return planner.fallback(lengths), True


class PlannerInProcess:
    """A planner that works in a process of its own, once a plan has taken long.

    Python runs one thread at a time: while the loader's thread plans, the thread that trains launches its kernels
    several times slower (``scripts/bench/planning_beside.py``). Plans are the same. Where the process ends, the thread
    plans.
    """

    def __init__(self, planner: Planner, slow_seconds: float = _SLOW_SECONDS) -> None:
        """``planner`` can be pickled; ``slow_seconds``: processor time that plans may take here."""
        self._planner = planner
        self._slow_seconds = slow_seconds
        self._is_slow = False
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., PlannerInProcess] | None = None

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        """See ``Planner``; raises what the planner raised."""
        if not self._is_slow:
            began = time.thread_time()
            try:
                return self._planner(lengths, should_stop)
            finally:
                self._is_slow = time.thread_time() - began > self._slow_seconds
        try:
            answer = self._ask(lengths, should_stop)
        except (OSError, EOFError, pickle.UnpicklingError):  # it has ended
            if self._end is not None and not self._end.alive:  # and so does the interpreter
                raise
            self._close()
            return self._planner(lengths, should_stop)
        if isinstance(answer, Exception):
            raise answer
        return cast(StepPlan, answer)

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        """See ``Planner``."""
        return self._planner.fallback(lengths)

    def _ask(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None) -> object:
        process = self._process or self._start()
        requests, answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        pickle.dump(tuple(lengths), requests, pickle.HIGHEST_PROTOCOL)
        requests.flush()
        while should_stop is not None and not select.select([answers], [], [], _LOOK_SECONDS)[0]:
            if should_stop():
                self._close()  # the next plan gets a process that is not still at this one
                raise OutOfTime("the planner was told to stop")
        return pickle.load(answers)

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "bytescale_ext.data.plan_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the training; this one ends with its input
        )
        self._end = weakref.finalize(self, _end, process)
        pickle.dump(self._planner, cast(IO[bytes], process.stdin), pickle.HIGHEST_PROTOCOL)
        return process

    def _close(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
