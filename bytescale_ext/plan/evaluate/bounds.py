"""Lower bounds on the time of a step under the cost model. No plan is faster.

A sequence of s tokens on a ring of d ranks costs each member ``t(s, d)`` of attention and linear work, forward and
backward; a micro-batch costs ``g`` once. Rings have at least ``dmin = ceil(s / C)`` members. With stages 0 to p-1,
stage q begins after the stages before it have run the forward of the pipeline's first micro-batch and ends before
they run the backward of its last micro-batch. Any micro-batch, even if empty, costs at least ``g``, so each bound on
the work of stage q alone grows by the sum of ``g`` of the stages before it.

If micro-batches run in k slices, each slice costs ``g`` once and has its own exchange (``CostModel.slice_costs``).
In the forward pass a slice passes a stage after the slices before it, in the backward pass after the slices that follow
it. A stage may run one slice while the next stage runs another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.slice_shares import SliceShares
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LowerBounds:
    """Bounds in the unit of the costs. Each bound holds for every plan, so the largest bound counts.

    Attributes:
        work: the busiest rank has at least the mean of all work: ``a s^2 + b s`` of each sequence, and ``g`` of each
            micro-batch. There are at least ``ceil(sum s / C)`` micro-batches.
        longest: the longest sequence runs on some ring, through one stage after the other; with slices, the longest
            path through its slices and the stages, down and up again. (A longer sequence costs more on any ring and has
            fewer rings to choose from, so no other sequence gives a larger bound.)
        capacity: the rank with most tokens has at least ``sum s / D`` of them, in at least
            ``ceil(sum s / (D C))`` micro-batches.
        area: the bound ``work`` with the exchange that does not overlap on a ring of the smallest width. ``d t(s, d)``
            never falls with d (computing costs ``a s^2``, exchange ``c s (d - 1)``; over nodes ``CostModel.floor``), so
            wider rings cost more in total.
        giants: sequences with ``2 floor(s / D) > C`` have rings of more than half of the ranks, so any two of them
            share a rank. Each has more than C / 2 tokens there, so they are never in one micro-batch and run one after
            the other.
    """

    work: float
    longest: float
    capacity: float
    area: float
    giants: float

    @property
    def largest(self) -> float:
        return max(self.work, self.longest, self.capacity, self.area, self.giants)


def lower_bounds(
    lengths: Sequence[int],
    cluster: Cluster,
    stages: Sequence[StageCost],
    slicing: Slicing = ONE_SLICE,
) -> LowerBounds:
    """Return bounds on the makespan of any plan of these sequences.

    Args:
        lengths: tokens of each sequence, at least one sequence.
        cluster: D ranks of C tokens; with pipelines, D is the number of pipelines. The seconds of
            all work are divided by the sum of all speeds, and the seconds of a rank or a ring by the largest speed.
        stages: cost of each pipeline stage; a single stage without pipelines.
        slicing: slices of each micro-batch, divided as in ``replay_stages``; 1 slice bounds 1F1B.

    Raises:
        ValueError: there is no sequence, or one does not fit on all ranks.
    """
    num_ranks, tokens_per_rank, num_slices = cluster.num_ranks, cluster.tokens_per_rank, slicing.num_slices
    tokens = np.asarray(lengths, dtype=np.float64)
    if not len(tokens) or tokens.max() > num_ranks * tokens_per_rank:
        most = int(tokens.max(initial=0))
        raise ValueError(f"no plan exists for {len(tokens)} sequences of up to {most} tokens on {num_ranks} ranks")
    total, speeds = float(tokens.sum()), cluster.rank_speeds()
    all_speeds, fastest = float(speeds.sum()), float(speeds.max())
    num_micro_batches = np.ceil(total / tokens_per_rank)
    most_micro_batches = float(np.ceil(total / (num_ranks * tokens_per_rank)))
    alone, least = np.ones(len(tokens)), np.ceil(tokens / tokens_per_rank)
    giants = np.sort(tokens[2 * (tokens // num_ranks) > tokens_per_rank])
    sliced = _Sliced(stages[0], slicing, cluster)
    stages = [stage.floor() for stage in stages]

    def on_one_stage(bound: Callable[[StageCost], float]) -> float:
        """Return the largest bound of a stage's own work with the fill and drain of the stages before it."""
        fills = np.cumsum([0.0] + [_launch(stage) / fastest for stage in stages])
        return max(float(fill) + bound(stage) for fill, stage in zip(fills, stages, strict=False))

    def mean_work(stage: StageCost, widths: Floats) -> float:
        work = float((widths[:, None] * np.add(*sliced.seconds(stage, tokens, widths))).sum())
        return (work + num_slices * _launch(stage) * float(num_micro_batches)) / all_speeds

    return LowerBounds(
        work=on_one_stage(lambda stage: mean_work(stage, alone)),
        longest=sliced.through(stages, float(tokens.max())) / fastest,
        capacity=on_one_stage(
            lambda stage: stage.both.b * total / num_ranks + num_slices * _launch(stage) * most_micro_batches
        )
        / fastest,
        area=on_one_stage(lambda stage: mean_work(stage, least)),
        giants=on_one_stage(lambda stage: sum(sliced.through([stage], float(giant)) for giant in giants)) / fastest,
    )


def _launch(stage: StageCost) -> float:
    return stage.forward.g + stage.backward.g


@dataclass(frozen=True, slots=True)
class _Sliced:
    """Cost of the slices of sequences. ``first``: stage on which all slices cost the same."""

    first: StageCost
    slicing: Slicing
    cluster: Cluster

    def seconds(self, stage: StageCost, tokens: Floats, widths: Floats) -> tuple[Floats, Floats]:
        """Return the forward and backward cost of each slice without g: [n, k]; ``tokens`` and ``widths``: [n]."""
        shares = SliceShares.of(self.first.both, tokens, widths, self.slicing)
        (forward, _), (backward, _) = shares.stage_costs(stage)
        return forward, backward

    def through(self, stages: Sequence[StageCost], length: float) -> float:
        """Return the time of one sequence through the stages and back, with the best width from dmin to D."""
        fewest = np.ceil(length / self.cluster.tokens_per_rank)
        widths = np.arange(fewest, self.cluster.num_ranks + 1, dtype=np.float64)
        tokens = np.full(len(widths), length)
        forwards, backwards = zip(*(self.seconds(stage, tokens, widths) for stage in stages), strict=True)
        down = [seconds + stage.forward.g for seconds, stage in zip(forwards, stages, strict=True)]
        up = [seconds[:, ::-1] + stage.backward.g for seconds, stage in zip(backwards, stages, strict=True)]
        return float((_longest_way(down) + _longest_way(up[::-1])).min())


def _longest_way(stages: Sequence[Floats]) -> Floats:
    """Return the longest path from the first slice on the first stage to the last slice on the last stage: [n].

    A step of the path goes to the next slice or to the next stage. ``stages``: seconds of each slice of n sequences on
    each stage, in running order: [n, k] each.
    """
    ends = np.zeros_like(stages[0])
    for seconds in stages:
        previous = np.zeros(len(seconds))
        for index in range(seconds.shape[1]):
            previous = np.maximum(previous, ends[:, index]) + seconds[:, index]
            ends[:, index] = previous
    return np.asarray(ends[:, -1])
