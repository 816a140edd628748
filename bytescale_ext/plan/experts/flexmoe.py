"""FlexMoE's scheduler (Nie et al. 2023): few changes of the placement at a time, each of which shortens the step.

While the busiest rank has more than ``threshold`` times the mean, one of its experts gets a replica on another rank
(*expand*), where a replica that is needed less gives up its slot if none is empty (*shrink*), or moves there
(*migrate*). Of all such changes the one with the least modelled step is made. If none shortens the step, the placement
stays. Quotas follow the loads in any case, because they cost nothing.
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
"""A change must lower the seconds by this share, so that there is no end of tiny ones."""


@dataclass(frozen=True)
class Change:
    """One change of the placement.

    Attributes:
        expert: that gets a replica.
        target: rank of the new replica.
        source: rank whose replica of it ends (migrate), or None (expand).
        evicted: expert whose replica on the target ends (shrink), or None.
    """

    expert: int
    target: int
    source: int | None = None
    evicted: int | None = None


@dataclass
class _Layer:
    """A placement that is being changed.

    Attributes:
        held: [ranks, experts], homes too.
        tokens: [ranks, experts].
        seconds: [ranks].
    """

    held: Bools
    tokens: Floats
    seconds: Floats

    @property
    def score(self) -> tuple[float, float]:
        """What is compared: the slowest rank, then the sum of squares."""
        return float(self.seconds.max()), float((self.seconds**2).sum())

    def improves(self, before: _Layer) -> bool:
        """Return whether the slowest rank is faster, or as fast where another rank as slow has become faster."""
        (slowest, squares), (slowest_before, squares_before) = self.score, before.score
        worth = 1 - LEAST_GAIN
        is_faster = slowest < worth * slowest_before
        return is_faster or (slowest <= slowest_before and squares < worth * squares_before)


def follow(plan: PlacementPlan, loads: Ints, cost: ExpertCost, threshold: float) -> PlacementPlan:
    """Return the next plan.

    Args:
        plan: of the layer so far.
        loads: [ranks, experts] tokens of each rank for each expert, as they were measured.
        cost: of the layer.
        threshold: ratio of the busiest rank to the mean from which the placement changes.
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
        tried = (_changed(layer, change, loads, cost) for change in _changes(layer, homes, plan.num_slots))
        best = min(tried, key=lambda one: one.score, default=None)
        if best is None or not best.improves(layer):
            break
        level_out(best.tokens, best.held)
        best.seconds = rank_seconds(best.tokens, best.held & ~homes, loads, cost)
        layer = best
    return PlacementPlan.of(as_parts(layer.tokens, homes), plan.num_slots)


def _changes(layer: _Layer, homes: Bools, num_slots: int) -> Iterator[Change]:
    """Yield what may relieve the busiest rank: its experts with most tokens, on ranks with the least work."""
    busiest = int(layer.seconds.argmax())
    experts = np.argsort(-layer.tokens[busiest], kind="stable")[:EXPERTS_TRIED].tolist()
    ranks = np.argsort(layer.seconds, kind="stable").tolist()
    replicas = layer.held & ~homes
    for expert in experts:
        for target in [rank for rank in ranks if not layer.held[rank, expert]][:RANKS_TRIED]:
            mine = np.flatnonzero(replicas[target]).tolist()
            is_full = layer.held[target].sum() == num_slots
            evicted = min(mine, key=lambda one: layer.tokens[target, one]) if is_full and mine else None
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
