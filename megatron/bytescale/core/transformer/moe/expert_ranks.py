"""The HDP ranks that share experts, and why they never deadlock.

Ranks of an expert group exchange tokens in each layer of experts, in the forward pass, the backward pass and the
recomputation, and every exchange needs all of them. So all ranks of a group run the same number of micro-batches,
completed by padding with zero loss weight (``plan.step.placed.micro_batch_counts``), and the plan is aligned
(``StepPlan.aligned``). This suffices, even if a ring spans several expert groups. Give each exchange of tokens and each
pass of a ring the key ::

    (turn in the stage's schedule, layer, attention before experts, index of the ring in its micro-batch)

A rank runs its communication in ascending order of the key. All participants of a communication agree on its key. The
ranks of a ring agree because the plan is aligned, and the ranks of an expert group because they run the same number of
micro-batches. Schedules of any length treat equal indices alike (``plan.schedule.actions``). So the unfinished
communication with the smallest key can always proceed. A slice takes one turn, like a micro-batch: every micro-batch
has the same number of slices, and a slice without tokens is padding. Other expert groups may run fewer or more
micro-batches, because they share only rings with this group, and the micro-batches of these rings exist in both groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertSizes:
    """The subset of Megatron's arguments that determines which ranks share layers and experts.

    Attributes:
        num_experts: number of experts per layer.
        tensor_model_parallel_size: number of ranks that share a layer.
        expert_tensor_parallel_size: number of ranks that share an expert; None or 0: as many as share a layer.
        expert_model_parallel_size: number of ranks over which experts are distributed.
    """

    num_experts: int | None
    tensor_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    expert_model_parallel_size: int


def ranks_that_share_experts(sizes: ExpertSizes) -> int:
    """Return the number of HDP ranks that exchange tokens in layers of experts; 1 without experts.

    These ranks are contiguous and start at a multiple of this number. Megatron lays the processes of a pipeline stage
    out in a row: tensor-parallel ranks are neighbours, and so are the ``expert tensor x expert model`` parallel ranks
    of an expert group. An HDP rank that belongs to two expert groups couples them.
    """
    if not sizes.num_experts:
        return 1
    tensor_ranks = sizes.tensor_model_parallel_size
    group = (sizes.expert_tensor_parallel_size or tensor_ranks) * sizes.expert_model_parallel_size
    return int(math.lcm(group, tensor_ranks) // tensor_ranks)
