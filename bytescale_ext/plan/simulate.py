"""Schedulers against each other on one step: each plans, its plan is checked and replayed, and pays what it costs.

Every scheduler gets the same sequences, ranks, C and costs. Nobody pays for what its run time does not have: padding
micro-batches and launches are counted where they are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.check import check_step_plan
from bytescale_ext.plan.cost import ModelCost, StageCost
from bytescale_ext.plan.planner import HdpPlanner
from bytescale_ext.plan.replay import replay_stages
from bytescale_ext.plan.schedule import micro_batch_counts
from bytescale_ext.plan.shard_table import ShardTable

Ints = npt.NDArray[np.int64]


class NotApplicable(ValueError):
    """A scheduler does not support the setting, in its own words."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What every scheduler has to work with.

    Attributes:
        num_ranks: D, HDP ranks (with pipelines: the number of pipelines).
        tokens_per_rank: C, the most tokens of a micro-batch on one rank.
        context: the most tokens of a sequence; the static mesh is chosen by it.
        stages: cost of each pipeline stage; one without pipelines.
        num_slices: k slices of each micro-batch (Seq1F1B) of the schedulers ``SLICED``; the others run 1F1B.
        kept_tokens: keys of rings' sequences up to this length are kept between slices.
        eager: slices run in the eager order, see ``seq1f1b.SliceSchedule``.
    """

    num_ranks: int
    tokens_per_rank: int
    context: int
    stages: tuple[StageCost, ...]
    num_slices: int = 1
    kept_tokens: int = 0
    eager: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a scheduler made of one step.

    Attributes:
        makespan: seconds from the first start to the last stop.
        idle_share: share of the time of all devices in which nothing is computed or received.
        exposed_communication: share of it in which a ring's exchange is waited for that attention does not hide.
        forwards_per_rank: micro-batches of the rank that has most.
        peak_tokens: the most tokens whose activations one device holds at a time.
        kept_keys: the most tokens whose keys it keeps beside them from slice to slice.
        distinct_peers: ranks with which a rank exchanges keys and values; of the rank that has most.
        planning_seconds: wall time of the planner, on one core.
    """

    makespan: float
    idle_share: float
    exposed_communication: float
    forwards_per_rank: int
    peak_tokens: int
    kept_keys: int
    distinct_peers: int
    planning_seconds: float


Scheduler = Callable[[Sequence[int], Setting], Outcome]


def stage_costs(cost: ModelCost, num_stages: int) -> tuple[StageCost, ...]:
    """A model cut into stages of equal layers; the last one has the embedding's and the output layer's time.

    Raises:
        ValueError: the stages do not divide the layers.
    """
    num_layers = cost.shape.num_layers
    if num_stages < 1 or num_layers % num_stages:
        raise ValueError(f"{num_stages} stages do not divide the {num_layers} layers of the cost file's model")
    return tuple(cost.stage(num_layers // num_stages, stage == num_stages - 1) for stage in range(num_stages))


def static(lengths: Sequence[int], setting: Setting) -> Outcome:
    """Data x context parallelism of fixed widths: the smallest power of two that holds the context at C.

    Documents are packed in the order in which they come; a pack ends where the next one no longer fits. Packs are
    dealt to the groups in turn. The ranks of a group are alike, so one of them stands for all. With pipelines every
    group runs equally many micro-batches, as Megatron does; without, groups do not wait for each other.
    """
    width = 1 << (-(-setting.context // setting.tokens_per_rank) - 1).bit_length()
    if setting.num_ranks % width:
        raise NotApplicable(f"context parallelism of {width} does not divide {setting.num_ranks} ranks")
    began = time.perf_counter()
    num_groups = setting.num_ranks // width
    tokens = np.asarray(lengths, dtype=np.int64)
    shares = -(-tokens // width)
    packs = _packs_in_order(shares, setting.tokens_per_rank)
    counts = np.bincount(np.arange(packs[-1] + 1) % num_groups, minlength=num_groups)
    if len(setting.stages) > 1:
        counts = np.full(num_groups, counts.max())
    rows = (np.cumsum(counts) - counts)[packs % num_groups] + packs // num_groups
    widths = np.minimum(width, tokens)
    table = ShardTable(counts, rows, np.arange(len(tokens)), np.zeros_like(rows), widths, tokens, shares)
    one_slice = replace(setting, num_slices=1)
    return _outcome(table, one_slice, min(width - 1, 2), time.perf_counter() - began)


def naive(lengths: Sequence[int], setting: Setting) -> Outcome:
    """ByteScale's Algorithm 1: widths by memory, ranks by tokens, nothing balanced."""
    return _planned(lengths, setting, "none")


def bytescale(lengths: Sequence[int], setting: Setting) -> Outcome:
    """ByteScale's Algorithm 2 as published."""
    return _planned(lengths, setting, "bytescale")


def ours(lengths: Sequence[int], setting: Setting) -> Outcome:
    """The planner of this project."""
    return _planned(lengths, setting, "pp" if len(setting.stages) > 1 else "dp")


SCHEDULERS: Final = MappingProxyType({"static": static, "naive": naive, "bytescale": bytescale, "ours": ours})
"""Those that need nothing but this package, by name."""

SLICED: Final = ("naive", "bytescale", "ours")
"""Those whose plans this project runs, in slices where it is told to; the others are Megatron as it is."""


def planner_of(setting: Setting, balance: str) -> HdpPlanner:
    """The planner with one kind of balance in this setting; it balances the slowest stage."""
    return HdpPlanner(
        num_ranks=setting.num_ranks,
        tokens_per_rank=setting.tokens_per_rank,
        cost=setting.stages[-1],
        balance=balance,
        num_stages=len(setting.stages),
        num_slices=setting.num_slices,
        kept_tokens=setting.kept_tokens,
        eager=setting.eager,
        aligned=len(setting.stages) > 1,
    )


def _planned(lengths: Sequence[int], setting: Setting, balance: str) -> Outcome:
    planner = planner_of(setting, balance)
    began = time.perf_counter()
    plan = planner(lengths)
    seconds = time.perf_counter() - began
    check_step_plan(plan, lengths)
    table = ShardTable.of(plan)
    padded = table.with_counts(np.array(micro_batch_counts(plan)))  # a rank that has none runs an empty one
    return _outcome(padded, setting, int(table.distinct_peers().max()), seconds)


def _outcome(table: ShardTable, setting: Setting, distinct_peers: int, planning_seconds: float) -> Outcome:
    result = replay_stages(
        table,
        setting.stages,
        num_slices=setting.num_slices,
        kept_tokens=setting.kept_tokens,
        eager=setting.eager,
    )
    return Outcome(
        makespan=result.makespan,
        idle_share=result.idle_share,
        exposed_communication=result.exposed_share,
        forwards_per_rank=int(table.counts.max()),
        peak_tokens=int(result.peak_tokens.max()),
        kept_keys=int(result.kept_keys.max()),
        distinct_peers=distinct_peers,
        planning_seconds=planning_seconds,
    )


def _packs_in_order(shares: Ints, capacity: int) -> Ints:
    """The number of the pack of each document: [n]."""
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
    groups: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], setting: Setting, planning_seconds: float
) -> Outcome:
    """Groups of sub-samples with a barrier between them, as Megatron's hybrid context parallelism runs them.

    In a group each rank takes its sub-samples in order, one in each forward, so each pays ``g``. The ring of a
    sub-sample is all ranks that have it, in the order 0, 1, 2, ....

    Args:
        groups: groups[number][rank] -> sequences; each sequence is in one group.
        lengths: tokens of each sequence.
        setting: without pipelines.
        planning_seconds: for the outcome.
    """
    placed = [
        np.array([(rank, seq) for rank, seqs in enumerate(group) for seq in seqs], dtype=np.int64) for group in groups
    ]
    tokens = np.asarray(lengths, dtype=np.int64)
    makespan = sum(replay_stages(_one_each(part, tokens, setting), setting.stages).makespan for part in placed)
    table = _one_each(np.concatenate(placed), tokens, setting)
    device_seconds = setting.num_ranks * makespan
    passes = (setting.stages[0].forward, setting.stages[0].backward)
    return Outcome(
        makespan=makespan,
        idle_share=1.0 - float(sum(table.row_costs(cost).sum() for cost in passes)) / device_seconds,
        exposed_communication=float(sum(table.row_exposed(cost).sum() for cost in passes)) / device_seconds,
        forwards_per_rank=int(table.counts.max()),
        peak_tokens=int(table.row_tokens.max()),
        kept_keys=0,
        distinct_peers=int(table.distinct_peers(folded=False).max()),
        planning_seconds=planning_seconds,
    )


def _one_each(placed: Ints, tokens: Ints, setting: Setting) -> ShardTable:
    """Micro-batches of one shard; ``placed`` is (rank, sequence) of each in the running order of the rank: [n, 2]."""
    ranks, seqs = placed.T
    rows = np.empty_like(ranks)
    rows[np.argsort(ranks, kind="stable")] = np.arange(len(ranks))
    sizes = np.bincount(seqs, minlength=len(tokens))
    in_order = np.lexsort((ranks, seqs))
    members = np.empty_like(ranks)
    members[in_order] = np.arange(len(seqs)) - (np.cumsum(sizes) - sizes)[seqs[in_order]]
    widths, lengths = sizes[seqs], tokens[seqs]
    shares = lengths // widths + (members < lengths % widths)
    return ShardTable(np.bincount(ranks, minlength=setting.num_ranks), rows, seqs, members, widths, lengths, shares)
