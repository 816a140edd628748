"""The order in which a pipeline stage runs its micro-batches, as Megatron's schedules have it, and how many it runs.

Megatron 0.19.2, ``megatron.core.pipeline_parallel.schedules``: one forward, one backward (1F1B), and the interleaved
1F1B of virtual stages, where every stage holds several chunks of the model. For 4 stages and 3 micro-batches::

    stage 0   F0 F1 F2 .. .. .. .. B0 .. B1 .. B2
    stage 1   .. F0 F1 F2 .. .. B0 .. B1 .. B2
    stage 2   .. .. F0 F1 .. B0 F2 B1 .. B2
    stage 3   .. .. .. F0 B0 F1 B1 F2 B2

Two pipelines with other numbers of micro-batches run the micro-batches that both have in the same order: the
order of the shorter one is that of the longer one with the others left out. With virtual stages that holds for
multiples of the group size only, and it is why rings between pipelines cannot wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from bytescale_ext.plan.placed import PlacedRanks
from bytescale_ext.plan.shapes import StepPlan


class Action(NamedTuple):
    """Forward ("F") or backward ("B") of one micro-batch through one chunk of a stage's layers."""

    kind: Literal["F", "B"]
    micro_batch: int
    chunk: int


def stage_actions(
    num_micro_batches: int, stage: int, num_stages: int, num_chunks: int = 1, group_size: int | None = None
) -> tuple[Action, ...]:
    """What stage ``stage`` of a pipeline runs, in order.

    Args:
        num_micro_batches: micro-batches of this pipeline, at least 1.
        stage, num_stages: 0 is the stage with the embedding. One stage: each forward is followed by its backward.
        num_chunks: virtual stages of each stage; chunk c of stage s holds part ``c * num_stages + s`` of the layers.
        group_size: with virtual stages, micro-batches that pass a chunk before the next chunk has its turn
            (``--microbatch-group-size-per-virtual-pipeline-stage``); None: the number of stages.

    Raises:
        ValueError: with virtual stages, a group smaller than the number of stages, or a number of micro-batches
            that is no multiple of the group.
    """
    assert num_micro_batches >= 1 and 0 <= stage < num_stages, f"{num_micro_batches=} {stage=} {num_stages=}"
    behind = num_stages - stage - 1
    if num_chunks == 1:
        forwards = [(index, 0) for index in range(num_micro_batches)]
        num_warm_up = behind
    else:
        group = group_size or num_stages
        forwards = list(_chunk_turns(num_micro_batches, num_stages, num_chunks, group))
        num_warm_up = 2 * behind + (num_chunks - 1) * group
    num_warm_up = min(num_warm_up, len(forwards))
    actions = [Action("F", *turn) for turn in forwards[:num_warm_up]]
    for number, (micro_batch, chunk) in enumerate(forwards):
        if num_warm_up + number < len(forwards):
            actions.append(Action("F", *forwards[num_warm_up + number]))
        actions.append(Action("B", micro_batch, num_chunks - 1 - chunk))
    return tuple(actions)


def receive_order(num_micro_batches: int, is_end: bool, num_chunks: int = 1, group_size: int = 1) -> tuple[int, ...]:
    """The micro-batch of each tensor that a stage receives from one neighbour, in order.

    Forward and backward alike: the other stage sends in the order in which it computes.

    Args:
        is_end: nothing is received for one chunk: forward the first stage's first, backward the last stage's last.
        num_micro_batches, num_chunks, group_size: as in ``stage_actions``.
    """
    turns = _chunk_turns(num_micro_batches, 1, num_chunks, group_size) if num_chunks > 1 else None
    if turns is None:
        return () if is_end else tuple(range(num_micro_batches))
    return tuple(micro_batch for micro_batch, chunk in turns if chunk or not is_end)


def _chunk_turns(num_micro_batches: int, num_stages: int, num_chunks: int, group: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, chunk) of every forward in order: a group through chunk 0, then through chunk 1, and so on."""
    if group < num_stages or num_micro_batches % group:
        raise ValueError(
            f"{num_micro_batches} micro-batches in groups of {group} over {num_stages} stages with virtual stages: "
            "the number must be a multiple of the group, and the group at least the number of stages"
        )
    for first in range(0, num_micro_batches, group):
        for chunk in range(num_chunks):
            for micro_batch in range(first, first + group):
                yield micro_batch, chunk


def micro_batch_counts(plan: StepPlan, expert_parallel: int = 1, multiple: int = 1) -> tuple[int, ...]:
    """Micro-batches that each HDP rank must run; those beyond its own are padding without weight in the loss.

    At least 1, so that a rank joins the collectives of its step; equal in each group of ``expert_parallel``
    contiguous ranks, whose layers exchange tokens; a multiple of ``multiple``, as virtual stages need it.
    """
    ranks = plan.ranks
    counts = ranks.counts if isinstance(ranks, PlacedRanks) else np.array([len(rank) for rank in ranks], dtype=np.int64)
    assert len(counts) % expert_parallel == 0, f"{len(counts)=} {expert_parallel=}"
    most = np.repeat(np.maximum(counts, 1).reshape(-1, expert_parallel).max(axis=1), expert_parallel)
    return tuple((-(-most // multiple) * multiple).tolist())
