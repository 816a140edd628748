"""The HDP ranks that share experts, and why they do not wait for each other for ever.

Ranks of an expert group exchange tokens in each layer of experts, in the forward pass, the backward pass and the
recomputation, and all of them must take part each time. So they run equally many micro-batches, filled up with padding
that has no weight in the loss (``plan.step.placed.micro_batch_counts``), and the plan is aligned
(``StepPlan.aligned``). This suffices, even for a ring that spans several expert groups. Give each exchange of tokens
and each pass of a ring the key ::

    (turn in the stage's schedule, layer, attention before experts, place of the ring in its micro-batch)

A rank runs its communication in ascending order of the key, and all participants have the same key for it: the ranks
of a ring because the plan is aligned, the ranks of an expert group because they run equally many micro-batches, and
both because schedules of any length treat equal indices alike (``plan.schedule.actions``). So the unfinished
communication with the smallest key can always proceed. A slice is a turn like a micro-batch: every micro-batch has
equally many, and one without tokens is padding. Other expert groups may run fewer or more micro-batches: they
share only rings with this group, and those belong to both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertSizes:
    """Megatron's arguments of the ranks that share layers and experts, of the same names.

    Attributes:
        num_experts: experts of a layer.
        tensor_model_parallel_size: ranks that share a layer.
        expert_tensor_parallel_size: ranks that share an expert; None or 0: as many as share a layer.
        expert_model_parallel_size: ranks over which experts are spread.
    """

    num_experts: int | None
    tensor_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    expert_model_parallel_size: int


def ranks_that_share_experts(sizes: ExpertSizes) -> int:
    """Return how many HDP ranks exchange tokens in layers of experts; 1 without experts.

    They are contiguous and start at a multiple of this number. Megatron lays the processes of a pipeline stage out in a
    row: tensor-parallel ranks are neighbours, and so are the ``expert tensor x expert model`` parallel ranks of an
    expert group. An HDP rank that lies in two expert groups couples them.
    """
    if not sizes.num_experts:
        return 1
    tensor_ranks = sizes.tensor_model_parallel_size
    group = (sizes.expert_tensor_parallel_size or tensor_ranks) * sizes.expert_model_parallel_size
    return int(math.lcm(group, tensor_ranks) // tensor_ranks)
