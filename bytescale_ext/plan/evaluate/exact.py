"""Optimum of small steps, to measure how far planners are from it. Too slow for training.

Both searches use the same model. Rings are contiguous ranks with at least ``ceil(s / C)`` members. The members of a
ring start and stop together, and a rank runs one sequence at a time. Each sequence is a separate micro-batch, and ``g``
is left out: without ``g``, a micro-batch of one ring shard and local sequences is no faster than its parts one after
the other. (Micro-batches of several partially overlapping rings are outside the model.) With ``g`` the optimum can only
be larger, so plans must be compared by costs without ``g``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import le

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.step.sizes import Cluster

_RESOLUTION = 1_000_000  # time units of the CP-SAT model in the makespan of its first solution
_MOST_KNOWN = 100  # states kept for comparison; more would prune more, but take longer
_NUM_STARTS = 500  # simple schedules that start the searches


@dataclass(frozen=True, slots=True)
class Optimum:
    """Shortest makespan, as far as it is known.

    Attributes:
        makespan: time of the best schedule found.
        bound: lower bound of all makespans; equal to ``makespan`` (within the solver's resolution) if it is optimal.
        is_proved: whether the search finished.
    """

    makespan: float
    bound: float
    is_proved: bool


@dataclass(frozen=True, slots=True)
class _Mode:
    """A sequence on ranks ``first .. first + width - 1``."""

    first: int
    width: int
    seconds: float


def without_launch(cost: CostModel) -> CostModel:
    """Return the cost model of both searches: ``g`` is 0."""
    return replace(cost, g=0.0)


def brute_force(lengths: Sequence[int], cluster: Cluster, cost: CostModel) -> float:
    """Return the shortest makespan by trying every schedule: up to about 8 sequences on 4 ranks.

    Some optimal schedule starts every sequence as soon as its ranks are free, in the order of the starts. So all such
    orders and places are tried, except orders that cannot beat the best order found. This is known when the latest
    rank, or the mean of all ranks with the remaining work, is too late; when another order left the same sequences
    with no rank later; or when a remaining sequence fits entirely before the next start, where it would cost nothing.

    Raises:
        ValueError: a sequence does not fit.
    """
    num_ranks = cluster.num_ranks
    modes = _modes(lengths, cluster, without_launch(cost))
    least_area = [min(mode.width * mode.seconds for mode in of_seq) for of_seq in modes]
    least_time = [min(mode.seconds for mode in of_seq) for of_seq in modes]
    best = _list_makespan(modes, num_ranks)
    earlier_ready: dict[frozenset[int], list[tuple[float, ...]]] = {}

    def search(left: frozenset[int], ready: tuple[float, ...], last_start: float) -> None:
        nonlocal best
        if not left:
            best = min(best, max(ready))
            return
        usable = tuple(max(time, last_start) for time in ready)
        bound = max(
            max(ready),
            (sum(usable) + sum(least_area[seq] for seq in left)) / num_ranks,
            min(usable) + max(least_time[seq] for seq in left),
        )
        known = earlier_ready.setdefault(left, [])
        if bound >= best * (1 - 1e-12) or any(_is_no_later(other, usable) for other in known):
            return
        known.append(usable)
        del known[:-_MOST_KNOWN]
        places = [(max(usable[mode.first : mode.first + mode.width]), seq, mode) for seq in left for mode in modes[seq]]
        first_stop = min(start + mode.seconds for start, _, mode in places)
        for start, seq, mode in places:
            if start < first_stop:
                stop = start + mode.seconds
                after = ready[: mode.first] + (stop,) * mode.width + ready[mode.first + mode.width :]
                search(left - {seq}, after, start)

    search(frozenset(range(len(modes))), (0.0,) * num_ranks, 0.0)
    return best


def solve(lengths: Sequence[int], cluster: Cluster, cost: CostModel, limit_seconds: float = 30.0) -> Optimum:
    """Return the shortest makespan of a few dozen sequences on 8 to 16 ranks, by OR-tools' CP-SAT in one thread.

    Times are rounded down to a millionth of a simple schedule's makespan, so ``bound`` holds for real times; the
    makespan found is rounded up.

    Raises:
        ValueError: a sequence does not fit. ImportError: OR-tools is not installed.
    """
    from ortools.sat.python import cp_model

    num_ranks = cluster.num_ranks
    modes = _modes(lengths, cluster, without_launch(cost))
    horizon_seconds = _list_makespan(modes, num_ranks)
    unit = horizon_seconds / _RESOLUTION
    model = cp_model.CpModel()
    makespan = model.new_int_var(0, _RESOLUTION, "makespan")
    on_rank: list[list[cp_model.IntervalVar]] = [[] for _ in range(num_ranks)]
    areas = []
    for seq, of_seq in enumerate(modes):
        start = model.new_int_var(0, _RESOLUTION, f"start {seq}")
        chosen = [model.new_bool_var(f"{seq} on {mode.first}+{mode.width}") for mode in of_seq]
        model.add_exactly_one(chosen)
        for mode, is_chosen in zip(of_seq, chosen, strict=True):
            size = int(mode.seconds / unit)
            interval = model.new_optional_fixed_size_interval_var(start, size, is_chosen, "")
            model.add(start + size <= makespan).only_enforce_if(is_chosen)
            areas.append(mode.width * size * is_chosen)
            for rank in range(mode.first, mode.first + mode.width):
                on_rank[rank].append(interval)
    for intervals in on_rank:
        model.add_no_overlap(intervals)
    model.add(sum(areas) <= num_ranks * makespan)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    has_solution = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    rounding = len(modes) * unit  # each interval lost less than a unit
    reached = solver.objective_value * unit + rounding if has_solution else horizon_seconds
    return Optimum(min(reached, horizon_seconds), solver.best_objective_bound * unit, status == cp_model.OPTIMAL)


def _modes(lengths: Sequence[int], cluster: Cluster, cost: CostModel) -> list[list[_Mode]]:
    """Return every place of every sequence, longest sequence first; a ring is as slow as its fullest member."""
    num_ranks, tokens_per_rank = cluster.num_ranks, cluster.tokens_per_rank
    result = []
    for length in sorted((int(length) for length in lengths), reverse=True):
        least = -(-length // tokens_per_rank)
        if least > num_ranks:
            raise ValueError(f"a sequence of {length} tokens needs {least} ranks, but there are {num_ranks}")
        result.append(
            [
                _Mode(first, width, cost.attention_cost(length, width) + cost.linear_cost(-(-length // width)))
                for width in range(least, num_ranks + 1)
                for first in range(num_ranks - width + 1)
            ]
        )
    return result


def _list_makespan(modes: Sequence[Sequence[_Mode]], num_ranks: int) -> float:
    """Return the best makespan of some simple schedules: sequences in many orders, each placed where it stops early."""
    random = np.random.default_rng(0)
    best = np.inf
    for number in range(_NUM_STARTS):
        ready = np.zeros(num_ranks)
        for seq in range(len(modes)) if number % 2 == 0 else random.permutation(len(modes)).tolist():
            stops = [float(ready[mode.first : mode.first + mode.width].max()) + mode.seconds for mode in modes[seq]]
            noise = random.uniform(1.0, 1.5, len(stops)) if number else 1.0
            chosen = modes[seq][int(np.argmin(np.array(stops) * noise))]
            ready[chosen.first : chosen.first + chosen.width] = stops[modes[seq].index(chosen)]
        best = min(best, float(ready.max()))
    return best


def _is_no_later(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(map(le, one, other))
