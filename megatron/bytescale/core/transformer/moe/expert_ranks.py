"""The HDP ranks whose layers of experts work as one, and why they do not wait for each other for ever.

Ranks of an expert group exchange tokens in each layer of experts: in a forward pass, its backward pass and its
recomputation, and all of them must take part each time. So they run equally many micro-batches, those beyond their
own being padding without weight in the loss (``bytescale_ext.plan.schedule.micro_batch_counts``), and the plan is
aligned (``StepPlan.aligned``). That is enough, also where a ring lies in several expert groups: give each exchange of
tokens and each pass of a ring the key ::

    (turn in the stage's schedule, layer, attention before experts, place of the ring in its micro-batch)

A rank runs its communication in ascending order of the key, and all who take part in one have the same key for it:
the ranks of a ring because the plan is aligned, the ranks of an expert group because they count alike, both because
schedules of any length treat equal indices alike (``bytescale_ext.plan.schedule``). So of what is unfinished, the one
with the smallest key can always go on. Other expert groups may run fewer or more: nothing of theirs has a key of
this group but rings, and those are in both.
"""

from __future__ import annotations

import math
from typing import Any


def ranks_that_share_experts(args: Any) -> int:
    """HDP ranks, contiguous ones from a multiple of this on, that exchange tokens in layers of experts; 1 for none.

    Megatron lays the processes of a pipeline stage out in a row: tensor-parallel ranks beside each other, and the
    ranks of a group of ``expert tensor x expert model`` parallel ranks too. A HDP rank that such a group holds in
    part binds the groups beside it.
    """
    if not args.num_experts:
        return 1
    tensor_ranks = args.tensor_model_parallel_size
    group = (args.expert_tensor_parallel_size or tensor_ranks) * args.expert_model_parallel_size
    return int(math.lcm(group, tensor_ranks) // tensor_ranks)
