"""Learning costs while training: passes of this rank are added up, and all ranks exchange the sums at agreed steps.

::

    step       1 2 3 4 5 6 7 8 9 ...
    measured       x x x x x x x        from ``FIRST_STEP`` on
    exchanged            x       x      after each ``EVERY`` steps: one all-reduce, which runs during the next step
    planned with new costs        ->    first the step that no rank has planned yet when the next step ends

Every rank gets the same sums, so every rank plans with the same costs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.learned import (
    KINDS,
    LearnedCosts,
    Learner,
    Passes,
    Statistics,
    slowest_of_groups,
    work_of_rows,
)
from bytescale_ext.plan.cost.shards import CoupledShards, ShardTable
from bytescale_ext.plan.step.plan import StepPlan

Floats = npt.NDArray[np.float64]

FIRST_STEP: Final = 3
"""First measured step, counted from 1. Caches and compilers are warm by then."""

EVERY: Final = 4
"""Number of steps between two exchanges of statistics."""

HELD_OUT: Final = 4
"""Every fourth pass is held out of fits and judges them."""

_OUTLIER = 5.0  # largest pace of a pass that counts, over the median pace; a pace is measured over predicted time
_RECENT = 64  # passes whose median pace tells outliers


@dataclass(frozen=True)
class MeasuredPass:
    """A measured pass of this rank.

    Attributes:
        micro_batch: index of the micro-batch.
        is_backward: whether it is the backward pass.
        seconds: measured seconds.
    """

    micro_batch: int
    is_backward: bool
    seconds: float


@dataclass(frozen=True, eq=False)
class _Exchange:
    """A sum over all processes that is under way.

    Attributes:
        sums: vector in host memory, complete after ``wait``.
        wait: waits for the sum; on CUDA only for its own stream, which has nothing else to do.
        on_device: vector that the device adds up.
    """

    sums: torch.Tensor
    wait: Callable[[], object]
    on_device: torch.Tensor

    @classmethod
    def begin(cls, mine: torch.Tensor, device: torch.device) -> _Exchange:
        """Begin an all-reduce of vectors in the default group. The host waits for no device. Collective."""
        if device.type != "cuda":
            work = dist.all_reduce(mine, async_op=True)
            assert work is not None, "every process is in the default group"
            return cls(mine, work.wait, mine)
        on_device = mine.pin_memory().to(device, non_blocking=True)
        work = dist.all_reduce(on_device, async_op=True)
        assert work is not None, "every process is in the default group"
        sums, done = torch.empty_like(mine, pin_memory=True), torch.cuda.Event()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            work.wait()
            sums.copy_(on_device, non_blocking=True)
            done.record()
        return cls(sums, done.synchronize, on_device)


@dataclass
class CostLearner:
    """Learns the costs of a run. The loader's thread reads the costs of a step while training adds passes.

    Attributes:
        stage: costs of this pipeline stage that the run began with.
        learner: state, equal on all ranks.
        rank: HDP rank of this process.
        plan_ahead: number of steps that are planned ahead.
        stage_index: pipeline stage of this process.
    """

    stage: StageCost
    learner: Learner
    rank: int
    plan_ahead: int
    stage_index: int = 0
    _rows: list[tuple[Floats, float, bool]] = field(default_factory=list)
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _work: _Exchange | None = None
    _versions: list[tuple[int, LearnedCosts]] = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _num_steps: int = 0

    def __post_init__(self) -> None:
        self._versions = [(0, self.learner.costs)]

    def at(self, step_index: int) -> LearnedCosts:
        """Return the costs with which a step is planned."""
        with self._lock:
            return next(costs for first, costs in reversed(self._versions) if first <= step_index)

    def restore(self, learner: Learner) -> None:
        """Continue from the state of a checkpoint."""
        with self._lock:
            self.learner, self._versions = learner, [(0, learner.costs)]

    def add(self, plan: StepPlan, passes: Sequence[MeasuredPass], num_slices: int = 1) -> None:
        """Add the passes of one step on this rank. The step after an exchange is left out, because costs change there.

        A forward pass counts if its micro-batch needs no other rank and is not the first: it may wait for parameters
        or for late ranks of its ring. In slices, only micro-batches without rings count, because slices exchange keys
        in their own way. A pass that took much longer than usual, or whose clock jumped, is left out.

        Args:
            plan: plan of the step.
            passes: measured passes.
            num_slices: slices of a micro-batch.
        """
        self._num_steps += 1
        if self._num_steps < FIRST_STEP or self._work is not None:
            return
        table = plan.fact(CoupledShards(self.rank))
        first, count = int(table.offsets[self.rank]), int(table.counts[self.rank])
        is_alone = np.ones(table.num_rows, dtype=np.bool_)
        is_alone[table.rows[table.widths > 1]] = False
        works = {
            way: self._work_of(table, replace(cost, g=num_slices * cost.g))[first : first + count]
            for way, cost in ((False, self.stage.forward), (True, self.stage.backward))
        }
        for one in passes:
            if not 0 <= one.micro_batch < count or not 0 < one.seconds < np.inf:
                continue
            alone = bool(is_alone[first + one.micro_batch])
            if (one.is_backward and num_slices == 1) or (alone and (one.is_backward or one.micro_batch > 0)):
                self._add_pass(works[one.is_backward][one.micro_batch], one.seconds, alone)

    def _work_of(self, table: ShardTable, cost: CostModel) -> Floats:
        """Return the work of each micro-batch, of the slowest one of its rings, at present speeds: [rows, kinds]."""
        costs = self.learner.costs
        work, speeds = work_of_rows(table, cost, costs), costs.speeds_on(self.stage_index)
        if speeds:
            work /= np.array(speeds)[table.row_ranks][:, None]
        return np.asarray(work[slowest_of_groups(table, work @ np.array(costs.factors))])

    def _add_pass(self, work: Floats, seconds: float, alone: bool) -> None:
        """Add a pass unless it is an outlier. ``work``: seconds by kind: [kinds]."""
        expected = float(work @ np.array(self.learner.costs.factors))
        if expected <= 0:
            return
        pace = seconds / expected
        usual = median(self._paces) if self._paces else pace
        self._paces.append(pace)
        if usual / _OUTLIER <= pace <= usual * _OUTLIER:
            self._rows.append((work, seconds, alone))

    def end_step(self, step_index: int, device: torch.device) -> LearnedCosts | None:
        """Exchange statistics if this step is agreed; return new costs if the last exchange gave any. Collective.

        Args:
            step_index: number of the step, from 0.
            device: device of the tensors that the default group sends.
        """
        learned = None
        if self._work is not None:
            exchange, self._work = self._work, None
            exchange.wait()
            learned = self.adopt(exchange.sums.numpy(), step_index)
        if is_agreed(step_index):
            self._work = _Exchange.begin(torch.from_numpy(self.take()), device)
        return learned

    def take(self) -> Floats:
        """Remove and return the sums of this rank's passes since the last exchange: [64 + 6 x stages x ranks]."""
        stages, ranks = self.learner.statistics.rank_seconds.shape
        added, rows = Statistics.none(ranks, stages), self._rows
        self._rows = []
        if rows:
            work, seconds, is_alone = (np.array(column) for column in zip(*rows, strict=True))
            held_out = np.arange(len(rows)) % HELD_OUT == HELD_OUT - 1
            passes = Passes((self.stage_index, self.rank), work, seconds, is_alone)
            added = added.with_passes(passes, held_out, self.learner.shape)
        return added.to_vector()

    def adopt(self, vector: Floats, step_index: int) -> LearnedCosts | None:
        """Learn from the sums of all ranks, and return new costs if there are any.

        The first step that no rank has planned yet uses them.

        Args:
            vector: sum of ``take`` over all ranks: [64 + 6 x stages x ranks].
            step_index: number of the step that has just ended.
        """
        before = self.learner.costs
        self.learner = self.learner.learn(self.learner.statistics.with_vector(vector))
        if self.learner.costs == before:
            return None
        with self._lock:
            ended = sum(first <= step_index for first, _ in self._versions) - 1
            self._versions = [*self._versions[ended:], (step_index + self.plan_ahead + 1, self.learner.costs)]
        return self.learner.costs


def is_agreed(step_index: int) -> bool:
    """Return whether ranks exchange statistics after this step, counted from 0."""
    return (step_index + 1) % EVERY == 0


def state_of(learner: Learner, hardware: str) -> dict[str, object]:
    """Return a learner as text and numbers, for a checkpoint. ``hardware``: name of the devices."""
    return {
        "hardware": hardware,
        "factors": list(learner.costs.factors),
        "speeds": list(learner.costs.speeds),
        "stage_speeds": [list(speeds) for speeds in learner.costs.stage_speeds],
        "scale": learner.scale,
        "is_settling": learner.is_settling,
        "sums": learner.statistics.to_vector().tolist(),
    }


def learner_of_state(state: Mapping[str, object], fresh: Learner, hardware: str) -> tuple[Learner, str]:
    """Return the learner of a checkpoint, and what was dropped of it, in words.

    Speeds belong to ranks: on another number of ranks or other hardware they are dropped, and the factors are kept.

    Args:
        state: result of ``state_of``.
        fresh: learner of this run before its first step.
        hardware: name of the devices of this run.
    """
    try:
        factors, speeds, sums = (_numbers(state[name]) for name in ("factors", "speeds", "sums"))
        (scale,) = _numbers([state["scale"]])
        stages = tuple(map(_numbers, _lists(state.get("stage_speeds", []))))
    except (KeyError, TypeError, ValueError) as error:
        return fresh, f"the learned costs of the checkpoint are damaged ({error!r}) and dropped"
    numbers = (*factors, *speeds, *chain(*stages), scale)
    if len(factors) != len(KINDS) or not all(0 < one < np.inf for one in numbers) or not np.isfinite(sums).all():
        return fresh, "the learned costs of the checkpoint are damaged (no positive numbers) and dropped"
    is_same = len(sums) == len(fresh.statistics.to_vector()) and state.get("hardware") == hardware
    num_stages, num_ranks = fresh.statistics.rank_seconds.shape
    fits = len(speeds) in (0, num_ranks) and len(stages) in (0, num_stages)
    if is_same and fits and all(len(one) == num_ranks for one in stages):
        statistics = fresh.statistics.with_vector(np.array(sums))
        is_settling = state.get("is_settling") is True
        return Learner(LearnedCosts(factors, speeds, stages), statistics, scale, is_settling), ""
    text = "the learned speeds of ranks are dropped, because the checkpoint has other ranks or hardware"
    return replace(fresh, costs=LearnedCosts(factors), scale=scale), text


def _numbers(value: object) -> tuple[float, ...]:
    """Return a list of numbers. Raises TypeError for anything else."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, int | float) for one in value):
        raise TypeError(f"{type(value).__name__} in place of numbers")
    return tuple(float(one) for one in value)


def _lists(value: object) -> list[object]:
    """Return a list. Raises TypeError for anything else."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"{type(value).__name__} in place of a list")
    return list(value)


def learned_line(learned: LearnedCosts) -> str:
    """Return the log line about new costs."""
    factors = ", ".join(f"{kind} x {factor:.3g}" for kind, factor in zip(KINDS, learned.factors, strict=True))
    slow = [f"rank {rank} at {speed:.2g}" for rank, speed in enumerate(learned.speeds) if speed < 1.0]
    more = f" and {len(slow) - 8} more" if len(slow) > 8 else ""
    speeds = (
        f"; slow HDP ranks: {', '.join(slow[:8])}{more} of the median speed" if slow else "; all ranks equally fast"
    )
    return f" hdp: costs learned: {factors}{speeds}"
