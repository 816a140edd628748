"""Widths and ranks of rings: moldable tasks on nested runs of ranks.

A ring may be wider than memory requires. As long as its exchange of keys and values overlaps with computation, this
adds no work. So widths are chosen such that all ranks of a ring are ready at the same time and no rank waits.

The ranks begin as one run, and the longest sequence goes first. A sequence takes the run that is ready first, divides
it into as many equal parts as are wide enough for it, and uses one whole part. Every later sequence is shorter and
needs no more ranks, so it fits into the remaining parts::

    ranks   0       8       16      24      32       32 ranks; needs: 15, 9, 6, 3, ...
    1st     |---- seq 0 ----|                        two parts of 16: takes the left part
    2nd                     |---- seq 1 ----|        takes the right part, too narrow for two parts of 9
    3rd                     |-seq 2-|                the right run is ready first: two parts of 8
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.hdp.deadline import ShouldStop, stop_if
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.hdp.ring_speeds import RingSpeeds
from bytescale_ext.plan.step.sizes import Cluster

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MAX_WASTE = 1.02  # a ring on a whole part may cost up to this many times the rank-seconds of its exact width


def target_widths(problem: Problem, target: float) -> Ints:
    """Return the fewest ranks with which each sequence takes at most ``target`` seconds: [n].

    A sequence that takes longer at every width gets the most ranks over which its exchange overlaps with computation,
    at least ``min_widths``. No sequence gets more ranks than a longer sequence. The problem's longest sequences come
    first.
    """
    lengths, cost, num_ranks = problem.lengths, problem.cost, problem.num_ranks
    sizes = lengths.astype(np.float64)
    seconds = max(target - cost.g, 1e-300)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        # computation: (a s^2 + b s) / d + ((h + e) s / d + m) (d - 1) <= seconds
        joining = (cost.h + cost.e) * sizes
        work = cost.a * cost.squares(sizes) + cost.b * sizes - joining
        computing = np.where(joining < seconds, _fewest_ranks(work, seconds - joining, cost.m), np.inf)
        # receiving: c s (d - 1) / d + b s / d <= seconds; more ranks help only if b > c
        ring = cost.c * sizes
        receiving = np.where(ring < seconds, (cost.b * sizes - ring) / (seconds - ring), 0.0)
        # the exchange overlaps with computation if c s (d - 1) <= a s^2 + ((h + e) s + m d) (d - 1)
        slope = (cost.c - cost.h - cost.e) * sizes - cost.m
        discriminant = slope * slope - 4 * cost.m * cost.a * sizes * sizes
        is_exposed = (slope > 0) & (discriminant >= 0)  # at some width
        root = np.sqrt(np.maximum(discriminant, 0.0))
        hidden = np.where(is_exposed, 2 * cost.a * sizes * sizes / (slope + root) + 1, np.inf)
        fastest = np.sqrt(np.maximum(work, 0.0) / cost.m) if cost.m else np.inf  # minimum of work / d + m (d - 1)
    targets = np.maximum(computing, receiving)
    unreachable = (targets > hidden) & ((ring >= seconds) | (cost.b <= cost.c))
    targets = np.where(unreachable, np.floor(hidden), targets)
    targets = np.where(np.isinf(computing), np.minimum(targets, fastest), targets)
    max_widths = np.minimum(lengths, num_ranks)
    widths = np.clip(np.ceil(np.minimum(targets, num_ranks)), problem.min_widths, max_widths).astype(np.int64)
    return np.asarray(np.minimum.accumulate(widths))


def _fewest_ranks(work: Floats, seconds: Floats, per_rank: float) -> Floats:
    """Return the smallest real d with ``work / d + per_rank (d - 1) <= seconds``, inf without one: [n], as ``work``."""
    total = seconds + per_rank
    discriminant = total * total - 4 * per_rank * work
    root = np.sqrt(np.maximum(discriminant, 0.0))
    return np.asarray(np.where(discriminant >= 0, 2 * work / (total + root), np.inf))


@dataclass(frozen=True, slots=True)
class NestedRings:
    """The places of rings, in running order.

    Attributes:
        first_ranks, widths: first rank and ranks of each ring: [n].
        loads: seconds of each rank: [num_ranks].
    """

    first_ranks: Ints
    widths: Ints
    loads: Floats


class _Runs:
    """Runs of ranks, which are taken with falling needs. A run is (load, first rank, ranks)."""

    def __init__(self, need: int) -> None:
        self._need = need
        self._wide: list[tuple[float, int, int]] = []  # a heap of the runs of at least ``need`` ranks
        self._narrow: list[tuple[int, tuple[float, int, int]]] = []  # a heap of the others, with the widest first

    def take(self, need: int) -> tuple[float, int, int]:
        """Remove and return the run of at least ``need`` ranks that is ready first (tie: lowest rank)."""
        self.ready(need)
        return heapq.heappop(self._wide)

    def ready(self, need: int) -> float:
        """Return the load of the run that ``take`` would return, inf if all runs are too narrow."""
        self._need = need
        while self._narrow and -self._narrow[0][0] >= need:
            heapq.heappush(self._wide, heapq.heappop(self._narrow)[1])
        return self._wide[0][0] if self._wide else np.inf

    def add(self, run: tuple[float, int, int]) -> None:
        """Add a run."""
        if run[2] >= self._need:
            heapq.heappush(self._wide, run)
        else:
            heapq.heappush(self._narrow, (-run[2], run))

    def all(self) -> Iterator[tuple[float, int, int]]:
        """Iterate over the runs, in any order."""
        return itertools.chain(self._wide, (run for _, run in self._narrow))


class _RunsOfSpeeds:
    """Runs of ranks of unlike speeds. A run is as slow as its slowest rank."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._speeds = cluster, cluster.rank_speeds()
        self._is_equal = self._is_split = cluster.has_equal_speeds
        self._runs: dict[float, _Runs] = {}
        self.add((0.0, 0, cluster.num_ranks), cluster.num_ranks)

    def speed(self, first: int, width: int) -> float:
        """Return the speed of the slowest rank of a run."""
        return 1.0 if self._is_equal else float(self._speeds[first : first + width].min())

    def add(self, run: tuple[float, int, int], need: int) -> None:
        """Add a run; ``need``: ranks of the last ring."""
        speed = self.speed(*run[1:])
        if speed not in self._runs:
            self._runs[speed] = _Runs(need)
        self._runs[speed].add(run)

    def take(self, length: int, need: int, cost: CostModel) -> tuple[float, int, int]:
        """Remove and return the run of at least ``need`` ranks on which a ring of ``length`` tokens ends first."""
        if not self._is_split:
            self._split(need)
        speed = next(iter(self._runs))
        if len(self._runs) > 1:
            seconds = cost.sequence_cost(length, need) + cost.g
            ends = ((runs.ready(need) + seconds / speed, -speed) for speed, runs in self._runs.items())
            speed = -min(ends)[1]
        return self._runs[speed].take(need)

    def _split(self, need: int) -> None:
        """Divide runs into parts of one speed, if one of these parts has ``need`` ranks."""
        bounds = _speed_bounds(self._cluster)
        parts = []
        for load, first, width in self.all():
            inside = [first, *(bound for bound in bounds if first < bound < first + width), first + width]
            parts += [(load, start, stop - start) for start, stop in itertools.pairwise(inside)]
        if max(width for _, _, width in parts) < need:
            return
        self._is_split, self._runs = True, {}
        for part in parts:
            self.add(part, need)

    def all(self) -> Iterator[tuple[float, int, int]]:
        """Iterate over the runs, in any order."""
        return itertools.chain.from_iterable(runs.all() for runs in self._runs.values())


def _speed_bounds(cluster: Cluster) -> list[int]:
    """Return the ranks at which the speed changes, and the begin and the end of the node around each."""
    changes = (np.flatnonzero(np.diff(cluster.rank_speeds())) + 1).tolist()
    node = cluster.node_ranks
    if node == cluster.num_ranks:
        return changes
    ends = [change - change % node for change in changes] + [change + -change % node for change in changes]
    return sorted({*changes, *ends})


def nest_rings(
    lengths: Ints,
    needs: Ints,
    cluster: Cluster,
    cost: CostModel,
    should_stop: ShouldStop = None,
    ring_speeds: RingSpeeds | None = None,
) -> NestedRings:
    """Place rings on nested runs of ranks (see the module), each at its earliest start (tie: lowest rank).

    A ring that is no wider than a node stays in one node; a wider ring begins with a node. If ranks have unlike
    speeds, a ring that fits on ranks of equal speed takes the ranks on which it ends first. A wider ring has shares in
    proportion to speeds where that pays (``ring_speeds``); otherwise it is as slow as its slowest rank.

    Args:
        lengths: tokens of each ring: [n].
        needs: the fewest ranks of each ring, in falling order: [n].
        cluster: the ranks.
        cost: cost of forward and backward together.
        should_stop: see ``HdpPlanner``.
        ring_speeds: speeds of rings; None: all rings have even shares.
    """
    num_ranks, node = cluster.num_ranks, cluster.node_ranks
    runs, ring_speeds = _RunsOfSpeeds(cluster), ring_speeds or RingSpeeds(cluster, is_uneven=False)
    firsts, widths = [], []
    for number, (length, need) in enumerate(zip(lengths.tolist(), needs.tolist(), strict=True)):
        if number % 1024 == 0:
            stop_if(should_stop)
        load, first, width = runs.take(length, need, cost)
        bounds = _divide_run(first, width, need, node)
        bounds, seconds = _without_waste(bounds, length, need, node, cost)
        for start, stop in itertools.pairwise(bounds[1:]):
            runs.add((load, start, stop - start), need)
        width = bounds[1] - first
        speed = ring_speeds.speed(first, width, length)
        runs.add((load + seconds / speed + cost.g / speed, first, width), need)
        firsts.append(first)
        widths.append(width)
    loads = np.empty(num_ranks, dtype=np.float64)
    for load, first, width in runs.all():
        loads[first : first + width] = load
    return NestedRings(np.array(firsts, dtype=np.int64), np.array(widths, dtype=np.int64), loads)


def _divide_run(first: int, width: int, need: int, node: int) -> list[int]:
    """Return the bounds of about equal parts of a run: parts of one node, or whole nodes.

    The parts are at least ``need`` wide; parts of one node may be followed by whole nodes.
    """
    stop = first + width
    inside = min(width, node - first % node)
    if need <= inside:
        count = inside // need
        bounds = [first + part * inside // count for part in range(count + 1)]
        return bounds + list(range(bounds[-1] + node, stop, node)) + ([stop] if stop > bounds[-1] else [])
    num_nodes = -(-width // node)
    for count in range(num_nodes // -(-need // node), 1, -1):
        bounds = [first + part * num_nodes // count * node for part in range(count)] + [stop]
        if all(high - low >= need for low, high in itertools.pairwise(bounds)):
            return bounds
    return [first, stop]


def _without_waste(bounds: list[int], length: int, need: int, node: int, cost: CostModel) -> tuple[list[int], float]:
    """Return the bounds with the first part narrowed to ``need`` if its whole width wastes too much time.

    Also return the seconds of the ring on the first part.
    """
    width = bounds[1] - bounds[0]
    exact = min(need if need <= node else -(-need // node) * node, width)
    if width > length:  # some rank would hold no token
        exact = min(exact, length)
    seconds = cost.sequence_cost(length, exact)
    if exact == width:
        return bounds, seconds
    if width <= length:
        on_whole = cost.sequence_cost(length, width)
        if width * on_whole <= _MAX_WASTE * exact * seconds:
            return bounds, on_whole
    return [bounds[0], bounds[0] + exact, *bounds[1:]], seconds
