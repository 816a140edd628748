"""The device memory of one step of a strategy. The search assumes full micro-batches; those of a step need not be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.memory.held import held
from bytescale_ext.plan.search.case import Case
from bytescale_ext.plan.search.strategy import BLOCK, PRICED
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.sizes import ONE_SLICE


def step_bytes(case: Case, lengths: Sequence[int]) -> float:
    """Return the most bytes of a device in a step of these documents.

    Where a policy moves activations, or only some layers are computed again, micro-batches count as full.
    """
    strategy, plan = case.strategy, case.plan(lengths)
    slicing = plan.slicing or ONE_SLICE
    if strategy.activations == BLOCK or (strategy.activations == PRICED and not case.keeps_all_in(slicing)):
        return case.run(lengths).device_bytes
    group = strategy.num_stages if strategy.chunks > 1 else 1
    counts = micro_batch_counts(plan, strategy.expert_parallel, group)
    table = ShardTable.of(plan).with_counts(np.array(counts))
    most = held(table, slicing, case.planner.stages[0].both, case.memory, strategy.chunks)
    return most.device_bytes(case.memory)
