"""Replay of a step plan under a cost model: start and end of each micro-batch on each stage.

Micro-batches that share a ring, directly or through others, are a coupled group. The ring's exchange couples them layer
by layer, so a group starts when all its members are ready and takes the time of its slowest member. With pipelines this
holds on every stage, for forward and backward separately. A stage runs its actions strictly in the order of
``plan.schedule.actions``, and it is idle while it waits for a ring. With slices, all of this holds for each slice.
``plan.schedule.simulate.WorkGraph`` computes the times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.cost.slice_shares import SliceShares
from bytescale_ext.plan.schedule.actions import BACKWARD, FORWARD, stage_orders
from bytescale_ext.plan.schedule.simulate import WorkGraph
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Replay:
    """Times of each micro-batch without pipelines, in the unit of the cost model (seconds below).

    Attributes:
        starts: start of each micro-batch, starts[rank][micro_batch].
        stops: end of each micro-batch, stops[rank][micro_batch]; equal for all members of a coupled group.
        rank_seconds: busy time of each rank by its own costs, without waiting.
        finish_seconds: end of the last micro-batch of each rank, or 0 if it has none.
    """

    starts: tuple[tuple[float, ...], ...]
    stops: tuple[tuple[float, ...], ...]
    rank_seconds: tuple[float, ...]
    finish_seconds: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(self.finish_seconds, default=0.0)

    @property
    def imbalance(self) -> float:
        """Makespan over mean busy time: 1 if no rank ever waits, or if there is no work."""
        busy = sum(self.rank_seconds)
        return self.makespan * len(self.rank_seconds) / busy if busy else 1.0


@dataclass(frozen=True, eq=False)
class StageReplay:
    """Times of each slice on each stage, in seconds. There are V = p x chunks virtual stages v = chunk x p + s.

    Attributes:
        num_stages: p, the number of pipeline stages.
        counts: number of micro-batches of each rank (pipeline), [num_ranks]. Micro-batches are numbered rank by rank,
            and slices micro-batch by micro-batch. Without slices each micro-batch is one slice.
        starts: start of each slice, [slices, 2, V]; the second axis is FORWARD, BACKWARD.
        stops: end of each slice, [slices, 2, V].
        own_seconds: cost of each slice itself, at most stop - start, [slices, 2, V].
        exposed_seconds: part of ``own_seconds`` that is ring exchange without overlap, [slices, 2, V].
    """

    num_stages: int
    counts: Ints
    starts: Floats
    stops: Floats
    own_seconds: Floats
    exposed_seconds: Floats

    @cached_property
    def makespan(self) -> float:
        return float(self.stops.max(initial=0.0))

    @property
    def _all_seconds(self) -> float:
        return self.makespan * len(self.counts) * self.num_stages

    @property
    def idle_share(self) -> float:
        """Share of all device time without computing or receiving: the pipeline bubble and waiting for rings."""
        return 1.0 - float(self.own_seconds.sum()) / self._all_seconds if self._all_seconds else 0.0

    @property
    def exposed_share(self) -> float:
        """Share of all device time spent waiting for ring exchange that does not overlap with attention."""
        return float(self.exposed_seconds.sum()) / self._all_seconds if self._all_seconds else 0.0


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Figures for the comparison of plans.

    Attributes:
        micro_batches_per_rank: number of micro-batches of each rank.
        tokens_per_rank: tokens of each rank, without padding.
        padding_share: padding tokens over all tokens of the padded micro-batches.
        fill_share: tokens over ``C x micro-batches``.
        makespan: time in the unit of the cost model.
        imbalance: makespan over mean busy time, at least 1.
    """

    micro_batches_per_rank: tuple[int, ...]
    tokens_per_rank: tuple[int, ...]
    padding_share: float
    fill_share: float
    makespan: float
    imbalance: float


def replay(plan: StepPlan, cost: CostModel, speeds: Floats | None = None) -> Replay:
    """Run the plan without pipelines: each rank runs its micro-batches in order.

    Args:
        plan: a plan of one step.
        cost: cost of forward and backward together.
        speeds: speed of each rank, [num_ranks]; None: all are 1.

    Raises:
        ValueError: the ranks wait for each other forever (``check_step_plan`` names the cycle).
    """
    table = ShardTable.of(plan)
    costs = table.row_costs(cost)
    costs = costs if speeds is None else costs / speeds[table.row_ranks]
    groups = table.row_groups
    seconds = np.zeros(int(groups.max(initial=-1)) + 1)
    np.maximum.at(seconds, groups, costs)
    same_rank = table.row_ranks[1:] == table.row_ranks[:-1]
    delays = np.zeros(int(same_rank.sum()))
    starts, left = WorkGraph(seconds, groups[:-1][same_rank], groups[1:][same_rank], delays).run()
    if left.any():
        raise ValueError(
            "the plan deadlocks: its ranks have no common order of their rings; check_step_plan names the cycle"
        )
    row_starts, row_stops = starts[groups], (starts + seconds)[groups]
    finish = np.zeros(table.num_ranks)
    np.maximum.at(finish, table.row_ranks, row_stops)
    return Replay(
        starts=_by_rank(row_starts, table.counts),
        stops=_by_rank(row_stops, table.counts),
        rank_seconds=tuple(np.bincount(table.row_ranks, weights=costs, minlength=table.num_ranks).tolist()),
        finish_seconds=tuple(finish.tolist()),
    )


def replay_stages(
    plan: StepPlan | ShardTable,
    stages: Sequence[StageCost],
    slicing: Slicing = ONE_SLICE,
    num_chunks: int = 1,
    group_size: int | None = None,
    p2p_seconds: float | Floats = 0.0,
) -> StageReplay:
    """Run the plan with pipelines: 1F1B, Megatron's interleaved order with model chunks, or Seq1F1B with slices.

    A forward takes the output of the previous virtual stage, a backward the gradient of the next one. Without pipelines
    (one stage) each forward is followed by its backward.

    Args:
        plan: ranks are pipelines; a table may have speeds of whole pipelines, or of each virtual stage of them.
        stages: cost of each of the V = p x num_chunks virtual stages, chunk by chunk.
        slicing: slices, which have equal cost (forward and backward) on the first stage.
        num_chunks: model chunks of each stage.
        group_size: micro-batches that run one chunk before the next chunk begins (interleaved order only).
        p2p_seconds: time of a message between neighbouring virtual stages: a number, or the time of a slice of each
            micro-batch after each virtual stage but the last, [num_rows, V - 1]. Members of a group send together.

    Raises:
        ValueError: the stages wait for each other forever; the number of stages is not a multiple of the chunks; or
            there are both slices and chunks.
    """
    table = plan if isinstance(plan, ShardTable) else ShardTable.of(plan)
    num_virtual = len(stages)
    if num_virtual < 1 or num_virtual % num_chunks:
        raise ValueError(f"{num_virtual} stage costs are not a multiple of {num_chunks} model chunks")
    num_slices, num_stages = slicing.num_slices, num_virtual // num_chunks
    if num_slices > 1 and num_chunks > 1:
        raise ValueError(f"{num_slices} slices with {num_chunks} model chunks: use 1 slice, or no chunks")
    sliced = _Slices.of(table, stages, slicing)
    if table.speeds is not None:
        sliced = sliced.at(np.repeat(table.speeds[table.row_ranks], num_slices, axis=0))
    groups = (table.row_groups[:, None] * num_slices + np.arange(num_slices)).ravel()
    seconds = np.zeros((int(groups.max(initial=-1)) + 1, 2, num_virtual))
    np.maximum.at(seconds, groups, sliced.own)
    orders = partial(stage_orders, num_stages, slicing=slicing, num_chunks=num_chunks, group_size=group_size)
    lanes = _lanes(table, groups, num_virtual, orders)
    before, after = (np.concatenate(part) for part in zip(*lanes, strict=True)) if lanes else (np.zeros(0, int),) * 2
    between = np.broadcast_to(p2p_seconds if num_stages > 1 else 0.0, (table.num_rows, num_virtual - 1))
    fed_before, fed_after, messages = _data_edges(_longest(between, table.row_groups, num_slices))
    graph = WorkGraph(
        seconds.ravel(),
        np.concatenate((before, fed_before)),
        np.concatenate((after, fed_after)),
        np.concatenate((np.zeros(len(before)), messages)),
    )
    starts, left = graph.run()
    if left.any():
        raise ValueError(_deadlock_text(table, left, num_stages, num_virtual, num_slices))
    shaped = starts.reshape(seconds.shape)
    starts, stops = shaped[groups], (shaped + seconds)[groups]
    return StageReplay(num_stages, table.counts, starts, stops, sliced.own, sliced.exposed)


def summarize(plan: StepPlan, cost: CostModel, tokens_multiple: int = 1) -> PlanSummary:
    """Return the figures of a plan whose micro-batches are padded to a multiple of ``tokens_multiple`` tokens."""
    table = ShardTable.of(plan)
    num_tokens = int(table.row_tokens.sum())
    padded = int((-(-table.row_tokens // tokens_multiple) * tokens_multiple).sum())
    per_rank = np.bincount(table.row_ranks, weights=table.row_tokens, minlength=table.num_ranks)
    result = replay(plan, cost)
    return PlanSummary(
        micro_batches_per_rank=tuple(table.counts.tolist()),
        tokens_per_rank=tuple(per_rank.astype(np.int64).tolist()),
        padding_share=(padded - num_tokens) / padded if padded else 0.0,
        fill_share=num_tokens / (table.num_rows * plan.tokens_per_rank) if table.num_rows else 0.0,
        makespan=result.makespan,
        imbalance=result.imbalance,
    )


@dataclass(frozen=True, eq=False)
class _Slices:
    """Work of each slice, micro-batch by micro-batch, with k slices per micro-batch.

    Attributes:
        own: seconds in each direction on each virtual stage (``StageReplay.own_seconds``), [slices, 2, V].
        exposed: part of ``own`` without overlap (``StageReplay.exposed_seconds``), [slices, 2, V].
    """

    own: Floats
    exposed: Floats

    @classmethod
    def of(cls, table: ShardTable, stages: Sequence[StageCost], slicing: Slicing) -> _Slices:
        num_slices = slicing.num_slices
        lengths, widths = table.lengths.astype(np.float64), table.widths.astype(np.float64)
        shares = SliceShares.of(stages[0].both, lengths, widths, slicing, table.hops(stages[0].forward))
        beyond_even = table.tokens - table.of_shares(lengths / widths)  # linear work counts the shard's own tokens
        cells = (table.rows[:, None] * num_slices + np.arange(num_slices)).ravel()

        def of_slices(values: Floats) -> Floats:
            return np.bincount(cells, weights=values.ravel(), minlength=table.num_rows * num_slices)

        own = np.zeros((table.num_rows * num_slices, 2, len(stages)))
        exposed = np.zeros_like(own)
        for cost in set(stages):
            same = [number for number, stage in enumerate(stages) if stage == cost]
            ways = shares.stage_costs(cost)
            for direction, one_way in ((FORWARD, cost.forward), (BACKWARD, cost.backward)):
                costs, beyond_attention = map(table.of_shares, ways[direction])
                costs = costs + one_way.b * beyond_even[:, None] * shares.tokens
                own[:, direction, same] = (one_way.g + of_slices(costs))[:, None]
                exposed[:, direction, same] = of_slices(beyond_attention)[:, None]
        return cls(own, exposed)

    def at(self, speeds: Floats) -> _Slices:
        """Return the work at the speed of each slice, [slices], or of each slice on each stage, [slices, V]."""
        by_stage = speeds.reshape(len(speeds), 1, -1)
        return _Slices(self.own / by_stage, self.exposed / by_stage)


def _lanes(
    table: ShardTable, groups: Ints, num_virtual: int, orders: Callable[[int], Sequence[Ints]]
) -> list[tuple[Ints, Ints]]:
    """Return edges between each action of a stage and the next one.

    Nodes are numbered (group, direction, virtual stage). Ranks with equal counts have equal orders.

    Args:
        groups: group of each slice, micro-batch by micro-batch: [slices].
        orders: function from the number of micro-batches of a pipeline to its ``stage_orders``.
    """
    num_slices = len(groups) // max(table.num_rows, 1)
    edges: list[tuple[Ints, Ints]] = []
    for count in np.unique(table.counts[table.counts > 0]).tolist():
        ranks = np.flatnonzero(table.counts == count)
        of_stages = orders(count)
        for stage, order in enumerate(of_stages):
            direction, place, chunk = order.T
            units = table.offsets[ranks][:, None] * num_slices + place
            nodes = (groups[units] * 2 + direction) * num_virtual + chunk * len(of_stages) + stage
            edges.append((nodes[:, :-1].ravel(), nodes[:, 1:].ravel()))
    return edges


def _longest(messages: Floats, row_groups: Ints, num_slices: int) -> Floats:
    """Return the seconds of the longest message of each group of slices after each virtual stage, [groups, V - 1].

    ``messages``: seconds of a message of a slice of each micro-batch, [num_rows, V - 1].
    """
    num_groups, boundaries = int(row_groups.max(initial=-1)) + 1, messages.shape[1]
    longest = np.zeros(num_groups * boundaries)
    np.maximum.at(longest, (row_groups[:, None] * boundaries + np.arange(boundaries)).ravel(), messages.ravel())
    return np.repeat(longest.reshape(num_groups, boundaries), num_slices, axis=0)


def _data_edges(messages: Floats) -> tuple[Ints, Ints, Floats]:
    """Return (befores, afters, delays) of the edges: forward down the virtual stages, then backward up.

    ``messages``: seconds of a message of each group after each virtual stage but the last, [groups, V - 1].
    """
    num_groups, num_virtual = len(messages), messages.shape[1] + 1
    path = np.append(np.arange(num_virtual), num_virtual + np.arange(num_virtual)[::-1])
    nodes = np.arange(num_groups)[:, None] * (2 * num_virtual) + path
    on_one_device = np.zeros((num_groups, 1))  # the last stage's forward and backward
    delays = np.concatenate((messages, on_one_device, messages[:, ::-1]), axis=1)
    return nodes[:, :-1].ravel(), nodes[:, 1:].ravel(), delays.ravel()


def _deadlock_text(
    table: ShardTable, left: npt.NDArray[np.bool_], num_stages: int, num_virtual: int, num_slices: int
) -> str:
    stuck = left.reshape(-1, num_slices, 2, num_virtual).any(axis=1)[table.row_groups]
    row, direction, virtual = (int(part[0]) for part in np.nonzero(stuck))
    rank = int(table.row_ranks[row])
    action = f"the {'backward' if direction else 'forward'} of micro-batch {row - int(table.offsets[rank])}"
    return (
        f"the plan deadlocks: {int(left.sum())} of {left.size} actions never start, the first is {action} of rank "
        f"{rank} on stage {virtual % num_stages}; a ring needs the same micro-batch index on all its "
        "ranks (aligned slots)"
    )


def _by_rank(values: Floats, counts: Ints) -> tuple[tuple[float, ...], ...]:
    stops = np.cumsum(counts).tolist()
    listed = values.tolist()
    return tuple(tuple(listed[stop - count : stop]) for stop, count in zip(stops, counts.tolist(), strict=True))
