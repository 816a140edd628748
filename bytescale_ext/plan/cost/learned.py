"""Costs that are learned from measured passes: corrections of a cost model, and speeds of ranks.

The seconds of a pass are split into kinds of work, each in proportion to the costs that the run began with. The
*factors* say how many times as long each kind takes. They are fitted by recursive least squares with forgetting (Ljung,
System Identification, 1999, section 11.2): the sums of squares and products of all ranks are added up, older sums fade,
and everyone solves the same small system. A kind that the passes do not show follows the others.

Ranks of unlike speed are kept apart: the seconds of a rank are divided by its own pace before they are added up, and
its speed follows from passes that need no other rank. The fit minimizes the squared error in seconds, divided by the
predicted seconds, so that errors count in proportion to time. A part of the passes is held out. A fit that predicts
these worse than the present factors is not adopted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import mul
from typing import Final

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.shards import ShardTable

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

KINDS: Final = ("attention", "linear", "launches", "blocks", "exchange")
"""Kinds of work: a, b, g, (h, e and m), and c of ``CostModel``."""

FORGETTING: Final = 0.5
"""Share of the sums that remains when new passes are added."""

EQUAL_SPEED: Final = 0.1
"""Ranks whose speed differs from the median by at most this share count as equally fast."""

_LEAST, _MOST = 0.02, 50.0  # factors, relative to the common ratio of measured and predicted time
_PULL = 1e-4  # weight of the common ratio in a fit, as a share of all predicted time
_ROUNDS = 400  # most rounds of coordinate descent over five factors
_CONVERGED = 1e-9  # relative change of all factors that ends the descent

LEAST_PASSES: Final = 32
"""Fewest passes of a fit."""


@dataclass(frozen=True, slots=True)
class LearnedCosts:
    """Corrections of the costs that a run began with.

    Attributes:
        factors: seconds of each kind of work, over the seconds of the costs.
        speeds: speed of each HDP rank, in pipelines of its slowest stage; empty: all are 1.
        stage_speeds: speed of each HDP rank on each stage of its pipeline; empty without pipelines, or if all are 1.
    """

    factors: tuple[float, ...] = (1.0,) * len(KINDS)
    speeds: tuple[float, ...] = ()
    stage_speeds: tuple[tuple[float, ...], ...] = ()

    def speeds_on(self, stage: int) -> tuple[float, ...]:
        """Return the speed of each HDP rank on a pipeline stage; empty: all are 1."""
        return self.stage_speeds[stage] if self.stage_speeds else self.speeds

    def all_speeds(self, num_stages: int, num_ranks: int) -> Floats:
        """Return the speed of each HDP rank on each stage: [stages, ranks]."""
        return np.array([self.speeds_on(stage) or (1.0,) * num_ranks for stage in range(num_stages)])

    def with_rates(self, rates: Floats) -> LearnedCosts:
        """Return the costs with the speeds of measured rates.

        A pipeline is as slow as its slowest stage, compared with the same stage of the others.

        Args:
            rates: ``rank_rates`` of passes whose work counts the present speeds: [stages, ranks].
        """
        num_stages, num_ranks = rates.shape
        stages = [speeds_of(row, self.speeds_on(stage)) or (1.0,) * num_ranks for stage, row in enumerate(rates)]
        speeds = tuple(map(min, zip(*stages, strict=True)))
        if all(speed == 1.0 for stage in stages for speed in stage):
            return replace(self, speeds=(), stage_speeds=())
        return replace(self, speeds=speeds, stage_speeds=tuple(stages) if num_stages > 1 else ())

    def of_pass(self, cost: CostModel) -> CostModel:
        """Return the corrected cost of one direction."""
        attention, linear, launches, blocks, exchange = self.factors
        return replace(
            cost,
            a=cost.a * attention,
            b=cost.b * linear,
            g=cost.g * launches,
            h=cost.h * blocks,
            m=cost.m * blocks,
            e=cost.e * blocks,
            c=cost.c * exchange,
        )

    def of_model(self, cost: ModelCost, device: str) -> ModelCost:
        """Return the corrected costs of a model, measured on this device, as the content of a cost file."""
        return replace(
            cost,
            device=device,
            source=f"learned while training, from: {cost.source}",
            forward=self.of_pass(cost.forward),
            backward=self.of_pass(cost.backward),
            head_forward=cost.head_forward * self.factors[1],
            head_backward=cost.head_backward * self.factors[1],
        )

    def of_stage(self, stage: StageCost) -> StageCost:
        """Return the corrected cost of a pipeline stage."""
        return replace(stage, forward=self.of_pass(stage.forward), backward=self.of_pass(stage.backward))


UNLEARNED: Final = LearnedCosts()
"""No corrections, and ranks of equal speed."""


def work_of_rows(table: ShardTable, cost: CostModel, learned: LearnedCosts) -> Floats:
    """Return the seconds of each micro-batch by kind of work, in one direction: [num_rows, kinds].

    Exchange that overlaps with computation counts as computation, as the corrected costs say. With attention windows,
    exchange counts where it does not overlap.

    Args:
        table: shards of a plan.
        cost: costs of the direction that the run began with.
        learned: present corrections.
    """
    lengths, widths = table.lengths.astype(np.float64), table.widths.astype(np.float64)
    hops = table.hops(cost)
    attention = table.of_shares(cost.a * np.asarray(cost.squares(lengths)) / widths)
    blocks = table.of_shares(((cost.h + cost.e) * lengths / widths + cost.m) * (widths - 1))
    exchange = table.of_shares(cost.c * lengths * hops / widths)
    factors = learned.factors
    if cost.window_share:
        exchange = cost.exposed_exchange(lengths, widths, hops)
        waits = np.ones(len(lengths), dtype=np.bool_)
    else:
        waits = factors[4] * exchange > factors[0] * attention + factors[3] * blocks
        attention, blocks = np.where(waits, 0.0, attention), np.where(waits, 0.0, blocks)
    columns = (attention, cost.b * table.tokens, blocks, np.where(waits, exchange, 0.0))
    sums = [np.bincount(table.rows, weights=column, minlength=table.num_rows) for column in columns]
    return np.stack((sums[0], sums[1], np.full(table.num_rows, cost.g), sums[2], sums[3]), axis=1)


def slowest_of_groups(table: ShardTable, seconds: Floats) -> Ints:
    """Return the micro-batch that takes longest in the coupled group of each micro-batch: [num_rows].

    ``seconds``: seconds of each micro-batch on its own rank: [num_rows].
    """
    groups = table.row_groups
    in_order = np.lexsort((seconds, groups))
    longest = np.empty(int(groups.max(initial=-1)) + 1, dtype=np.int64)
    longest[groups[in_order]] = in_order  # the last assignment counts
    return longest[groups]


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sufficient statistics of measured passes, which add up over passes, steps and ranks.

    Measured seconds of the first four are over the pace of their rank, so that slow ranks distort no fit.

    Attributes:
        squares: sums of products of the kinds of work, fitted and held out: [2, kinds, kinds].
        products: sums of products of work and measured seconds: [2, kinds].
        measured: sums of squared measured seconds: [2].
        counts: number of passes: [2].
        rank_work: seconds by kind of work of passes that need no other rank, by pipeline stage and HDP rank:
            [stages, ranks, kinds].
        rank_seconds: measured seconds of these passes: [stages, ranks].
    """

    squares: Floats
    products: Floats
    measured: Floats
    counts: Floats
    rank_work: Floats
    rank_seconds: Floats

    @classmethod
    def none(cls, num_ranks: int, num_stages: int = 1) -> Statistics:
        """Return the statistics of no passes."""
        kinds, places = len(KINDS), (num_stages, num_ranks)
        parts = (np.zeros((2, kinds, kinds)), np.zeros((2, kinds)), np.zeros(2), np.zeros(2))
        return cls(*parts, np.zeros((*places, kinds)), np.zeros(places))

    def _parts(self) -> tuple[Floats, ...]:
        return (self.squares, self.products, self.measured, self.counts, self.rank_work, self.rank_seconds)

    def to_vector(self) -> Floats:
        """Return all sums as one vector: [64 + 6 x stages x ranks]."""
        return np.concatenate([part.ravel() for part in self._parts()])

    def with_vector(self, vector: Floats) -> Statistics:
        """Return statistics of the same ranks with the sums of a vector: [64 + 6 x stages x ranks]."""
        shapes = [part.shape for part in self._parts()]
        stops = np.cumsum([int(np.prod(shape)) for shape in shapes])
        pieces = np.split(vector, stops[:-1])
        return Statistics(*(piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)))

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(*(mine + theirs for mine, theirs in zip(self._parts(), other._parts(), strict=True)))

    def faded(self, share: float = FORGETTING) -> Statistics:
        """Return the sums multiplied by ``share``, so that older passes count less. The seconds of ranks become 0."""
        fits = [share * part for part in self._parts()[:4]]
        return Statistics(*fits, *(np.zeros_like(part) for part in self._parts()[4:]))

    def with_passes(self, passes: Passes, is_held_out: Bools, shape: Floats) -> Statistics:
        """Return the statistics with further passes of one rank.

        Args:
            passes: the passes.
            is_held_out: whether each pass judges a fit: [n].
            shape: present factors, without their scale: [kinds].
        """
        predicted = passes.work @ shape
        times = passes.seconds * (predicted.sum() / passes.seconds.sum())
        parts = [part.copy() for part in self._parts()]
        for number, chosen in enumerate((~is_held_out, is_held_out)):
            work, seconds, weights = passes.work[chosen], times[chosen], 1.0 / predicted[chosen]
            parts[0][number] += (work * weights[:, None]).T @ work
            parts[1][number] += (weights * seconds) @ work
            parts[2][number] += float((weights * seconds) @ seconds)
            parts[3][number] += len(seconds)
        parts[4][passes.place] += passes.work[passes.is_alone].sum(axis=0)
        parts[5][passes.place] += passes.seconds[passes.is_alone].sum()
        return Statistics(*parts)

    def error(self, factors: Floats) -> float:
        """Return the squared error of a fit in the passes that are held out. ``factors``: [kinds]."""
        error = factors @ self.squares[1] @ factors - 2 * self.products[1] @ factors + self.measured[1]
        return max(0.0, float(error))


@dataclass(frozen=True, eq=False)
class Passes:
    """Measured passes of one process.

    Attributes:
        place: pipeline stage and HDP rank.
        work: seconds of each pass by kind of work, at the speed that its ranks have: [n, kinds].
        seconds: measured seconds: [n].
        is_alone: whether the pass needs no other rank: [n].
    """

    place: tuple[int, int]
    work: Floats
    seconds: Floats
    is_alone: Bools


def fit(statistics: Statistics, present: Floats) -> Floats:
    """Return the factors that fit the passes best: [kinds]. A kind without passes keeps its share of the present time.

    Coordinate descent finds the minimum within bounds. Its result depends on its
    arguments only, so all ranks get equal factors.

    ``present``: present factors: [kinds].
    """
    squares, products = statistics.squares[0], statistics.products[0]
    curvature = float(present @ squares @ present)
    if curvature <= 0 or products @ present <= 0:
        return present
    ratio = float(products @ present) / curvature
    target = ratio * present
    pull = _PULL * curvature / present**2 / len(present)
    rows, rests, pulls = squares.tolist(), (products + pull * target).tolist(), pull.tolist()
    factors: list[float] = target.tolist()
    for _ in range(_ROUNDS):  # over numbers, because arrays of five are slower
        before = factors.copy()
        for kind, row in enumerate(rows):
            rest = rests[kind] - sum(map(mul, row, factors)) + row[kind] * factors[kind]
            factors[kind] = min(max(rest / (row[kind] + pulls[kind]), _LEAST * ratio), _MOST * ratio)
        if all(abs(new - old) <= _CONVERGED * old for new, old in zip(factors, before, strict=True)):
            break
    return np.array(factors)


def rank_rates(statistics: Statistics, factors: Floats) -> Floats:
    """Return predicted over measured seconds of each rank on each stage, NaN without timings: [stages, ranks].

    ``factors``: factors of the prediction: [kinds].
    """
    is_known = (statistics.rank_seconds > 0) & (statistics.rank_work.sum(axis=2) > 0)
    seconds = np.where(is_known, statistics.rank_seconds, 1.0)
    return np.asarray(np.where(is_known, statistics.rank_work @ factors / seconds, np.nan))


def speeds_of(rates: Floats, present: tuple[float, ...]) -> tuple[float, ...]:
    """Return the speed of each rank, relative to the median; empty if all ranks are about equally fast.

    A rank without timings, or whose speed changed by less than ``EQUAL_SPEED``, keeps its present speed.

    ``rates``: ``rank_rates`` of one stage, from passes whose work counts the present speeds: [ranks].
    """
    before = np.array(present) if present else np.ones(len(rates))
    known = np.isfinite(rates)
    if not known.any():
        return present
    speeds = np.where(known, rates * before, 1.0)
    speeds /= np.median(speeds[known])
    speeds = np.where(~known | (np.abs(speeds / before - 1.0) <= EQUAL_SPEED), before, speeds)
    speeds = _in_levels(np.maximum(speeds, _LEAST))
    return () if (speeds == 1.0).all() else tuple(float(f"{speed:.3g}") for speed in speeds)


def _in_levels(speeds: Floats) -> Floats:
    """Return the mean speed of the ranks that are about as fast, 1 about the median, for each rank: [ranks].

    So noise does not divide equal ranks. ``speeds``: [ranks].
    """
    in_order = np.argsort(speeds, kind="stable")
    ascending = speeds[in_order]
    levels, begin = np.empty_like(speeds), 0
    while begin < len(speeds):
        stop = int(np.searchsorted(ascending, ascending[begin] * (1 + EQUAL_SPEED), side="right"))
        mean = float(ascending[begin:stop].mean())
        levels[in_order[begin:stop]] = 1.0 if abs(mean - 1.0) <= EQUAL_SPEED else mean
        begin = stop
    return levels


@dataclass(frozen=True, eq=False)
class Learner:
    """State of learning, equal on all ranks: a new value after each exchange of statistics.

    Attributes:
        costs: present corrections.
        statistics: faded sums of all earlier passes of all ranks.
        scale: measured over predicted time of the median rank, part of all factors.
        is_settling: whether the speeds of ranks have just changed, so that the last passes counted in no fit.
    """

    costs: LearnedCosts
    statistics: Statistics
    scale: float = 1.0
    is_settling: bool = False

    @classmethod
    def new(cls, num_ranks: int, num_stages: int = 1, costs: LearnedCosts | None = None) -> Learner:
        """Return the state before the first step."""
        return cls(costs or LearnedCosts(), Statistics.none(num_ranks, num_stages))

    @property
    def shape(self) -> Floats:
        """Present factors without their scale: [kinds]."""
        return np.array(self.costs.factors) / self.scale

    def learn(self, added: Statistics) -> Learner:
        """Return the state after these passes of all ranks, with new costs if they predict the held-out passes better.

        If ranks have become slower or faster, their rings slowed others too. Then only the speeds and the scale change,
        and the passes count in no fit. The next passes count, even if speeds change again: they never cease to, where
        ranks share a host. Sums that are not finite are dropped.
        """
        if not np.isfinite(added.to_vector()).all():
            return self
        statistics = self.statistics.faded() + added
        shape = self._fitted(statistics)
        rates = rank_rates(added, shape)
        costs = self.costs.with_rates(rates)
        is_settling = costs != self.costs and not self.is_settling
        if is_settling:
            statistics, shape = self.statistics, self.shape
            rates = rank_rates(added, shape)
            costs = self.costs.with_rates(rates)
        before, after = (one.all_speeds(*added.rank_seconds.shape) for one in (self.costs, costs))
        known = (rates * before / after)[np.isfinite(rates)]
        scale = 1.0 / float(np.median(known)) if len(known) else self.scale
        factors = tuple(float(f"{factor:.6g}") for factor in scale * shape)
        return Learner(replace(costs, factors=factors), statistics, scale, is_settling)

    def _fitted(self, statistics: Statistics) -> Floats:
        """Return factors without their scale that fit the passes, or the present ones if those predict better."""
        shape = self.shape
        if statistics.counts.sum() >= LEAST_PASSES and statistics.counts.min() > 0:
            fitted = fit(statistics, shape)
            if statistics.error(fitted) < statistics.error(shape):
                return fitted
        return shape
