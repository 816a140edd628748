"""Widths and ranks of rings: moldable tasks on nested runs of ranks.

A ring may be wider than memory requires. As long as its exchange of keys and values hides behind computing, this adds
no work. Widths are therefore chosen so that all ranks of a ring are ready at the same time and no rank waits. The ranks
begin as one run; the longest sequence goes first. It takes the run that is ready first, cuts it into as many equal
parts as are still wide enough, and uses one whole part. Every later sequence is shorter and needs no more ranks, so it
fits into the remaining parts::

    ranks   0      8      16     24     32          32 ranks; needs: 15, 9, 6, 3 ...
    1st     |---- seq 0 ----|                        two parts of 16, takes the left one
    2nd     |               |---- seq 1 ----|        takes the right one (16 is too narrow for two parts of 9) 3rd     |
    |       |-seq 2-|       |        right is ready first: two parts of 8
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.hdp.deadline import ShouldStop, stop_if
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.sizes import Cluster

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_WASTE = 1.02  # a ring that uses a whole run may cost this many times the rank-seconds of its exact width


def target_widths(problem: Problem, target: float) -> Ints:
    """Return the fewest ranks with which each sequence takes at most ``target`` seconds: [n].

    A sequence that takes longer at every width gets the most ranks over which its exchange still hides behind
    computing, or its fewest ranks. No sequence gets more than a longer one. The problem's longest sequences come first.
    """
    lengths, cost, most = problem.lengths, problem.cost, problem.num_ranks
    sizes = lengths.astype(np.float64)
    seconds = max(target - cost.g, 1e-300)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        # computing: (a s^2 + b s) / d + ((h + e) s / d + m) (d - 1) <= seconds
        joining = (cost.h + cost.e) * sizes
        work = cost.a * cost.squares(sizes) + cost.b * sizes - joining
        computing = np.where(joining < seconds, _fewest(work, seconds - joining, cost.m), np.inf)
        # receiving: c s (d - 1) / d + b s / d <= seconds; wider helps only while b > c
        ring = cost.c * sizes
        receiving = np.where(ring < seconds, (cost.b * sizes - ring) / (seconds - ring), 0.0)
        # it hides behind computing while c s (d - 1) <= a s^2 + ((h + e) s + m d) (d - 1)
        slow = (cost.c - cost.h - cost.e) * sizes - cost.m
        room = slow * slow - 4 * cost.m * cost.a * sizes * sizes
        shown = (slow > 0) & (room >= 0)
        hidden = np.where(shown, 2 * cost.a * sizes * sizes / (slow + np.sqrt(np.maximum(room, 0.0))) + 1, np.inf)
        least = np.sqrt(np.maximum(work, 0.0) / cost.m) if cost.m else np.inf  # of work / d + m (d - 1)
    wanted = np.maximum(computing, receiving)
    unreachable = (wanted > hidden) & ((ring >= seconds) | (cost.b <= cost.c))
    wanted = np.where(unreachable, np.floor(hidden), wanted)
    wanted = np.where(np.isinf(computing), np.minimum(wanted, least), wanted)
    widths = np.clip(np.ceil(np.minimum(wanted, most)), problem.min_widths, np.minimum(lengths, most)).astype(np.int64)
    return np.asarray(np.minimum.accumulate(widths))


def _fewest(work: Floats, seconds: Floats, each: float) -> Floats:
    """Return the smallest d with ``work / d + each (d - 1) <= seconds``, not rounded; inf: there is none. [n] each."""
    most = seconds + each
    room = most * most - 4 * each * work
    return np.asarray(np.where(room >= 0, 2 * work / (most + np.sqrt(np.maximum(room, 0.0))), np.inf))


@dataclass(frozen=True, slots=True)
class NestedRings:
    """The places of rings, in the order in which they run.

    Attributes:
        first_ranks, widths: of each ring: [n].
        loads: seconds of each rank: [num_ranks].
    """

    first_ranks: Ints
    widths: Ints
    loads: Floats


def nest_rings(
    lengths: Ints, needs: Ints, cluster: Cluster, cost: CostModel, should_stop: ShouldStop = None
) -> NestedRings:
    """Place rings on nested runs of ranks (see the module), each where it can start first (tie: lowest rank).

    A ring no wider than a node lies inside one node; a wider one begins with a node.

    Args:
        lengths: tokens of each ring sequence, the one that needs most ranks first: [n].
        needs: the fewest ranks of each, at most all ranks: [n], never increasing.
        cluster: the ranks.
        cost: forward and backward together.
        should_stop: see ``HdpPlanner``.
    """
    num_ranks, node = cluster.num_ranks, cluster.node_ranks
    runs = [(0.0, 0, num_ranks)]  # (load, first rank, ranks), a heap
    firsts, widths = [], []
    for number, (length, need) in enumerate(zip(lengths.tolist(), needs.tolist(), strict=True)):
        if number % 1024 == 0:
            stop_if(should_stop)
        narrow = []
        while runs[0][2] < need:
            narrow.append(heapq.heappop(runs))
        load, first, width = heapq.heappop(runs)
        for run in narrow:
            heapq.heappush(runs, run)
        bounds = _cut(first, width, need, node)
        bounds = _without_waste(bounds, length, need, node, cost)
        for start, stop in itertools.pairwise(bounds[1:]):
            heapq.heappush(runs, (load, start, stop - start))
        width = bounds[1] - first
        heapq.heappush(runs, (load + cost.sequence_cost(length, width) + cost.g, first, width))
        firsts.append(first)
        widths.append(width)
    loads = np.empty(num_ranks, dtype=np.float64)
    for load, first, width in runs:
        loads[first : first + width] = load
    return NestedRings(np.array(firsts, dtype=np.int64), np.array(widths, dtype=np.int64), loads)


def _cut(first: int, width: int, need: int, node: int) -> list[int]:
    """Return the bounds of the equal parts of a run, the first at least ``need`` wide: whole nodes or parts of one."""
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


def _without_waste(bounds: list[int], length: int, need: int, node: int, cost: CostModel) -> list[int]:
    """Return the bounds with the first part cut to ``need``, if its whole width exposes too much of the exchange."""
    width = bounds[1] - bounds[0]
    exact = need if need <= node else min(-(-need // node) * node, width)
    if width > length:  # some rank would hold nothing
        exact = min(exact, length)
    elif width * cost.sequence_cost(length, width) <= _WASTE * exact * cost.sequence_cost(length, exact):
        return bounds
    return [bounds[0], bounds[0] + exact, *bounds[1:]] if exact < width else bounds
