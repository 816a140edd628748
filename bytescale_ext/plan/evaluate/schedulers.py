"""Comparison of schedulers on one step. Each scheduler makes a plan, which is checked and replayed.

Every scheduler gets the same sequences, ranks, C and costs. Each scheduler is charged only for overheads that its own
runtime has: padding micro-batches and launches count only where they really run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.table import auto_balance, planner_names, planner_row
from bytescale_ext.plan.memory.held import peak_memory
from bytescale_ext.plan.memory.stage_memory import StageMemory
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing

Ints = npt.NDArray[np.int64]


class NotApplicable(ValueError):
    """A scheduler does not support the scenario; the message says why."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Input that all schedulers share.

    Attributes:
        context: largest number of tokens of a sequence, which decides the width of the static mesh.
        stages: cost of each pipeline stage, the slowest last; a single stage without pipelines.
        memory: device memory of each pipeline stage.
        planner: planner with the ranks and slices; with pipelines, each rank is a pipeline. The schedulers
            ``UNSLICED`` run 1F1B instead.
    """

    context: int
    stages: tuple[StageCost, ...]
    memory: StageMemory
    planner: HdpPlanner

    @property
    def cluster(self) -> Cluster:
        """Ranks and their capacity."""
        return self.planner.cluster

    @property
    def slicing(self) -> Slicing:
        """Slices of a micro-batch, or one slice if the planner chooses the slices of each step."""
        return self.planner.slicing if self.planner.choice is None else ONE_SLICE


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one scheduler on one step.

    Attributes:
        makespan: seconds from the first start to the last stop.
        idle_share: share of all device time without computing or receiving.
        exposed_communication: share of all device time spent waiting for ring exchange that does not overlap with
            attention.
        forwards_per_rank: largest number of micro-batches of a rank.
        peak_tokens: largest number of tokens with activations on one device at a time.
        kept_keys: largest number of tokens of other devices whose keys one device keeps from slice to slice.
        device_bytes: peak memory of one device: model states, activations, kept keys, sums of key gradients.
        host_bytes: peak host memory of one device, for swapped keys.
        distinct_peers: largest number of ranks with which a rank exchanges keys and values.
        planning_seconds: processor time of the planner.
    """

    makespan: float
    idle_share: float
    exposed_communication: float
    forwards_per_rank: int
    peak_tokens: int
    kept_keys: int
    device_bytes: float
    host_bytes: float
    distinct_peers: int
    planning_seconds: float


Scheduler = Callable[[Sequence[int], Scenario], Outcome]


def static(lengths: Sequence[int], scenario: Scenario) -> Outcome:
    """Run data x context parallelism of one width: the smallest power of two ranks on which the context fits.

    Documents are packed in their order. A pack ends when the next document does not fit. Packs are dealt to the groups
    round-robin. All ranks of a group do the same work, so one rank represents the group. With pipelines every group
    runs the same number of micro-batches, as in Megatron. Without pipelines groups do not wait for each other.
    """
    num_ranks, tokens_per_rank = scenario.cluster.num_ranks, scenario.cluster.tokens_per_rank
    width = 1 << (-(-scenario.context // tokens_per_rank) - 1).bit_length()
    if num_ranks % width:
        raise NotApplicable(f"context parallelism of {width} does not divide {num_ranks} ranks")
    began = time.process_time()
    num_groups = num_ranks // width
    tokens = np.asarray(lengths, dtype=np.int64)
    shares = -(-tokens // width)
    packs = _packs_in_order(shares, tokens_per_rank)
    counts = np.bincount(np.arange(packs[-1] + 1) % num_groups, minlength=num_groups)
    if len(scenario.stages) > 1:
        counts = np.full(num_groups, counts.max())
    rows = (np.cumsum(counts) - counts)[packs % num_groups] + packs // num_groups
    widths = np.minimum(width, tokens)
    seqs, first_ranks = np.arange(len(tokens)), packs % num_groups * width
    table = ShardTable(counts, rows, seqs, np.zeros_like(rows), widths, tokens, shares, first_ranks=first_ranks)
    seconds = time.process_time() - began
    outcome = _outcome(table, scenario, ONE_SLICE)
    return replace(outcome, distinct_peers=min(width - 1, 2), planning_seconds=seconds)


def planned_by(balance: str) -> Scheduler:
    """Return the scheduler that runs the planner of this name."""
    return lambda lengths, scenario: _planned(lengths, scenario, balance)


def ours(lengths: Sequence[int], scenario: Scenario) -> Outcome:
    """Plan with this project's balance planner."""
    return _planned(lengths, scenario, auto_balance(len(scenario.stages) > 1))


def schedulers() -> dict[str, Scheduler]:
    """Return the schedulers that need only this package, by name.

    Each planner of ``plan.hdp.table`` has its own name. "naive" is "none", and "ours" is the planner of "auto".
    """
    planners = {name: planned_by(name) for name in planner_names()}
    return {"static": static, "naive": planned_by("none"), "ours": ours, **planners}


UNSLICED: Final = ("static", "megatron-hybrid")
"""Schedulers that run on unmodified Megatron, without slices; the others run the planners of this project."""


def _planned(lengths: Sequence[int], scenario: Scenario, balance: str) -> Outcome:
    if len(scenario.stages) > 1 and not planner_row(balance).aligned:
        raise NotApplicable(f"{balance} does not align slots, but pipelines need aligned slots")
    planner = replace(scenario.planner, balance=balance)
    began = time.process_time()
    plan = planner(lengths)
    seconds = time.process_time() - began
    check_step_plan(plan, lengths, ranks_per_node=scenario.cluster.ranks_per_node)
    table = ShardTable.of(plan)
    padded = table.with_counts(np.array(micro_batch_counts(plan)))  # a rank without micro-batches runs an empty one
    outcome = _outcome(padded, scenario, plan.slicing or scenario.slicing)
    return replace(outcome, distinct_peers=int(table.distinct_peers().max()), planning_seconds=seconds)


def _outcome(table: ShardTable, scenario: Scenario, slicing: Slicing) -> Outcome:
    """Return the figures of a plan in these slices, without its peers and its planning time."""
    memory = scenario.memory
    result = replay_stages(table.at(scenario.cluster.unequal_speeds()), scenario.stages, slicing)
    most = peak_memory(table, slicing, scenario.stages[-1].both, memory)
    return Outcome(
        makespan=result.makespan,
        idle_share=result.idle_share,
        exposed_communication=result.exposed_share,
        forwards_per_rank=int(table.counts.max()),
        peak_tokens=round(float(most.tokens.max())),
        kept_keys=round(float(most.kept_keys.max())),
        device_bytes=most.device_bytes(memory),
        host_bytes=most.host_bytes(memory),
        distinct_peers=0,
        planning_seconds=0.0,
    )


def _packs_in_order(shares: Ints, capacity: int) -> Ints:
    """Return the number of the pack of each document, packed in order by ``shares``: [n] both."""
    ends = np.cumsum(shares)
    packs = np.zeros(len(shares), dtype=np.int64)
    first = number = 0
    while first < len(shares):
        used = int(ends[first - 1]) if first else 0
        stop = int(np.searchsorted(ends, used + capacity, side="right"))
        packs[first:stop] = number
        first, number = stop, number + 1
    return packs


def run_groups(
    groups: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], scenario: Scenario, planning_seconds: float
) -> Outcome:
    """Run groups of sub-samples with a barrier between them, as Megatron's hybrid context parallelism does.

    Each rank of a group runs its sub-samples in order, one per forward pass, so each sub-sample costs ``g``. The ring
    of a sub-sample is all ranks that have it, in the order 0, 1, 2, ....

    Args:
        groups: groups[number][rank] -> sequences; each sequence is in one group.
        lengths: tokens of each sequence.
        scenario: without pipelines.
        planning_seconds: time of planning, for the outcome.
    """
    placed = [
        np.array([(rank, seq) for rank, seqs in enumerate(group) for seq in seqs], dtype=np.int64) for group in groups
    ]
    tokens = np.asarray(lengths, dtype=np.int64)
    parts, speeds = (_one_each(part, tokens, scenario) for part in placed), scenario.cluster.unequal_speeds()
    makespan = sum(replay_stages(part.at(speeds), scenario.stages).makespan for part in parts)
    table = _one_each(np.concatenate(placed), tokens, scenario)
    device_seconds = scenario.cluster.num_ranks * makespan
    passes = (scenario.stages[0].forward, scenario.stages[0].backward)
    return Outcome(
        makespan=makespan,
        idle_share=1.0 - float(sum(table.row_costs(cost).sum() for cost in passes)) / device_seconds,
        exposed_communication=float(sum(table.row_exposed(cost).sum() for cost in passes)) / device_seconds,
        forwards_per_rank=int(table.counts.max()),
        peak_tokens=int(table.row_tokens.max()),
        kept_keys=0,
        device_bytes=scenario.memory.most_bytes([scenario.memory.layer.activations * float(table.row_tokens.max())]),
        host_bytes=0.0,
        distinct_peers=int(table.distinct_peers(folded=False).max()),
        planning_seconds=planning_seconds,
    )


def _one_each(placed: Ints, tokens: Ints, scenario: Scenario) -> ShardTable:
    """Return micro-batches of one shard each.

    ``placed``: (rank, sequence) of each shard in the order of its rank, [n, 2]; ``tokens``: tokens of each sequence.
    """
    ranks, seqs = placed.T
    rows = np.empty_like(ranks)
    rows[np.argsort(ranks, kind="stable")] = np.arange(len(ranks))
    sizes = np.bincount(seqs, minlength=len(tokens))
    in_order = np.lexsort((ranks, seqs))
    members = np.empty_like(ranks)
    members[in_order] = np.arange(len(seqs)) - (np.cumsum(sizes) - sizes)[seqs[in_order]]
    widths, lengths = sizes[seqs], tokens[seqs]
    shares = lengths // widths + (members < lengths % widths)
    return ShardTable(
        np.bincount(ranks, minlength=scenario.cluster.num_ranks), rows, seqs, members, widths, lengths, shares
    )
