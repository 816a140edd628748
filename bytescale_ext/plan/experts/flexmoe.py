"""FlexMoE's scheduler (Nie et al. 2023), which makes a few changes of the placement at a time to shorten the step.

While the busiest rank has more than ``threshold`` times the mean number of tokens, three kinds of change are considered
for one of its experts:

- *expand*: the expert gets a replica on another rank.
- *shrink*: if that rank has no empty slot, the replica with the fewest tokens gives up its slot.
- *migrate*: the replica on the busiest rank moves to the other rank.

The change with the shortest modelled step is made, if it shortens the step. Quotas always follow the loads, because
new quotas cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bytescale_ext.plan.experts.cost import ExpertCost, rank_seconds
from bytescale_ext.plan.experts.placement import Bools, Floats, Ints, PlacementPlan, homes_of
from bytescale_ext.plan.experts.quotas import as_parts, level_out, pour

EXPERTS_TRIED = 3
RANKS_TRIED = 3
MOST_CHANGES = 64
LEAST_GAIN = 1e-3
"""Smallest relative decrease of the seconds that justifies a change. It prevents many tiny changes."""


@dataclass(frozen=True)
class Change:
    """One change of the placement.

    Attributes:
        expert: expert that gets a replica.
        target: rank of the new replica.
        source: rank that loses its replica of the expert (migrate), or None (expand).
        evicted: expert that loses its replica on the target (shrink), or None.
    """

    expert: int
    target: int
    source: int | None = None
    evicted: int | None = None


@dataclass
class _Layer:
    """Placement during the search.

    Attributes:
        held: whether a rank has an expert, as its home or as a replica; [ranks, experts].
        tokens: tokens of each expert that each rank computes, [ranks, experts].
        seconds: seconds of each rank, [ranks].
    """

    held: Bools
    tokens: Floats
    seconds: Floats

    @property
    def score(self) -> tuple[float, float]:
        """Seconds of the slowest rank, then the sum of the squared seconds of all ranks. Smaller is better."""
        return float(self.seconds.max()), float((self.seconds**2).sum())

    def improves(self, before: _Layer) -> bool:
        """Return whether this placement is better by at least ``LEAST_GAIN``.

        The slowest rank must be faster. If it is only as fast as before, the sum of squares must be smaller, so that
        progress counts even if several ranks are equally slow.
        """
        (slowest, squares), (slowest_before, squares_before) = self.score, before.score
        limit = 1 - LEAST_GAIN
        is_faster = slowest < limit * slowest_before
        return is_faster or (slowest <= slowest_before and squares < limit * squares_before)


def follow(plan: PlacementPlan, loads: Ints, cost: ExpertCost, threshold: float) -> PlacementPlan:
    """Return the next plan of a layer.

    Args:
        plan: current plan of the layer.
        loads: measured tokens of each rank for each expert, [ranks, experts].
        cost: cost constants of the layer.
        threshold: ratio of the busiest rank to the mean above which the placement changes.
    """
    homes = homes_of(plan.num_experts, plan.num_ranks)
    held = homes | (plan.parts() > 0)
    tokens = np.where(held, loads.sum(0) / held.sum(0), 0.0)
    level_out(tokens, held)
    layer = _Layer(held, tokens, rank_seconds(tokens, held & ~homes, loads, cost))
    for _ in range(MOST_CHANGES):
        of_rank = layer.tokens.sum(1)
        if of_rank.max() <= threshold * of_rank.mean():
            break
        candidates = (_changed(layer, change, loads, cost) for change in _changes(layer, homes, plan.num_slots))
        best = min(candidates, key=lambda candidate: candidate.score, default=None)
        if best is None or not best.improves(layer):
            break
        level_out(best.tokens, best.held)
        best.seconds = rank_seconds(best.tokens, best.held & ~homes, loads, cost)
        layer = best
    return PlacementPlan.of(as_parts(layer.tokens, homes), plan.num_slots)


def _changes(layer: _Layer, homes: Bools, num_slots: int) -> Iterator[Change]:
    """Yield changes that may relieve the busiest rank: replicas of its largest experts on the ranks with least work."""
    busiest = int(layer.seconds.argmax())
    experts = np.argsort(-layer.tokens[busiest], kind="stable")[:EXPERTS_TRIED].tolist()
    ranks = np.argsort(layer.seconds, kind="stable").tolist()
    replicas = layer.held & ~homes
    for expert in experts:
        for target in [rank for rank in ranks if not layer.held[rank, expert]][:RANKS_TRIED]:
            on_target = np.flatnonzero(replicas[target]).tolist()
            is_full = layer.held[target].sum() == num_slots
            evicted = min(on_target, key=lambda other: layer.tokens[target, other]) if is_full and on_target else None
            if is_full and evicted is None:
                continue
            yield Change(expert, target, evicted=evicted)
            if replicas[busiest, expert]:
                yield Change(expert, target, source=busiest, evicted=evicted)


def _changed(layer: _Layer, change: Change, loads: Ints, cost: ExpertCost) -> _Layer:
    """Return the layer after a change. ``loads``: [ranks, experts]."""
    held, tokens = layer.held.copy(), layer.tokens.copy()
    held[change.target, change.expert] = True
    if change.source is not None:
        held[change.source, change.expert] = False
    if change.evicted is not None:
        held[change.target, change.evicted] = False
    of_rank = tokens.sum(1)
    for expert in (change.evicted, change.expert):
        if expert is not None:
            pour(tokens, of_rank, np.flatnonzero(held[:, expert]), expert)
    homes = homes_of(held.shape[1], held.shape[0])
    return _Layer(held, tokens, rank_seconds(tokens, held & ~homes, loads, cost))
