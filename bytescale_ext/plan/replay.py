"""An event-driven replay of a step plan under a cost model: when each micro-batch would run."""

from __future__ import annotations

from dataclasses import dataclass

from bytescale_ext.plan.check import ring_classes
from bytescale_ext.plan.cost import CostModel
from bytescale_ext.plan.shapes import StepPlan


@dataclass(frozen=True, slots=True)
class Replay:
    """When each micro-batch runs, in the unit of the cost model (seconds below).

    Attributes:
        starts: starts[rank][micro_batch].
        stops: stops[rank][micro_batch].
        rank_seconds: busy time of each rank, without waiting.
        finish_seconds: when each rank ends its last micro-batch (0 when it has none).
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
        """Makespan over mean busy time: 1 when no rank ever waits, 1 too when there is no work."""
        busy = sum(self.rank_seconds)
        return self.makespan * len(self.rank_seconds) / busy if busy else 1.0


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """The figures by which plans are compared.

    Attributes:
        micro_batches_per_rank: count for each rank.
        tokens_per_rank: tokens of each rank, padding left out.
        padding_share: padding tokens over all tokens of the padded micro-batches.
        fill_share: tokens over ``C x micro-batches``.
        makespan: in the unit of the cost model.
        imbalance: makespan over mean busy time, at least 1.
    """

    micro_batches_per_rank: tuple[int, ...]
    tokens_per_rank: tuple[int, ...]
    padding_share: float
    fill_share: float
    makespan: float
    imbalance: float


def replay(plan: StepPlan, cost: CostModel) -> Replay:
    """Run the plan: each rank takes its micro-batches in order, one that shares a ring starts when all members can.

    Members of a ring start together and each stops after its own cost. No communication is modelled but the
    ring exchange that the cost model contains.

    Raises:
        ValueError: the ranks wait for each other for ever (``check_step_plan`` names the cycle).
    """
    classes = ring_classes(plan)
    members: dict[int, list[tuple[int, int]]] = {}
    for rank, row in enumerate(classes):
        for index, number in enumerate(row):
            members.setdefault(number, []).append((rank, index))
    missing = {number: len(rows) for number, rows in members.items()}
    costs = [[cost.micro_batch_cost(micro_batch, plan.lengths) for micro_batch in rank] for rank in plan.ranks]
    starts: list[list[float]] = [[] for _ in plan.ranks]
    stops: list[list[float]] = [[] for _ in plan.ranks]
    arrived = [row[0] for row in classes if row]
    while arrived:
        number = arrived.pop()
        missing[number] -= 1
        if missing[number]:
            continue
        start = max(stops[rank][-1] if stops[rank] else 0.0 for rank, _ in members[number])
        for rank, index in members[number]:
            starts[rank].append(start)
            stops[rank].append(start + costs[rank][index])
            arrived.extend(classes[rank][index + 1 : index + 2])
    if any(missing.values()):
        raise ValueError("the plan deadlocks: its ranks have no common order of their rings; check_step_plan names it")
    return Replay(
        starts=tuple(tuple(row) for row in starts),
        stops=tuple(tuple(row) for row in stops),
        rank_seconds=tuple(sum(row) for row in costs),
        finish_seconds=tuple(row[-1] if row else 0.0 for row in stops),
    )


def summarize(plan: StepPlan, cost: CostModel, tokens_multiple: int = 1) -> PlanSummary:
    """Figures of a plan; micro-batches are padded at their end to a multiple of ``tokens_multiple``."""
    counts = [[micro_batch.num_tokens for micro_batch in rank] for rank in plan.ranks]
    padded = sum(-(-count // tokens_multiple) * tokens_multiple for rank in counts for count in rank)
    num_micro_batches = sum(len(rank) for rank in counts)
    num_tokens = sum(sum(rank) for rank in counts)
    result = replay(plan, cost)
    return PlanSummary(
        micro_batches_per_rank=tuple(len(rank) for rank in counts),
        tokens_per_rank=tuple(sum(rank) for rank in counts),
        padding_share=(padded - num_tokens) / padded if padded else 0.0,
        fill_share=num_tokens / (num_micro_batches * plan.tokens_per_rank) if num_micro_batches else 0.0,
        makespan=result.makespan,
        imbalance=result.imbalance,
    )
