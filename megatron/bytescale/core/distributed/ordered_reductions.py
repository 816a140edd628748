"""Gradient reductions in an order that agrees with the exchanges of rings (see ``plan.step.reductions``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from bytescale_ext.plan.step.reductions import Overlaps
from megatron.bytescale.registry import specialize

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime


class ReductionGate:
    """Holds back the reductions of one process until its last exchange of a step.

    Attributes:
        is_open: whether reductions begin at once.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._waiting: list[tuple[OrderedBucketGroup, bool | None]] = []

    def hold(self, group: OrderedBucketGroup, force_all_reduce: bool | None) -> None:
        """Remember a reduction. Its place in the order is the same on all ranks, because the model is."""
        self._waiting.append((group, force_all_reduce))

    def open(self) -> None:
        """Begin the reductions that were held back, in order."""
        self.is_open = True
        waiting, self._waiting = self._waiting, []
        for group, force_all_reduce in waiting:
            group.start_grad_sync(force_all_reduce)


class OrderedBucketGroup(_ParamAndGradBucketGroup):  # type: ignore[misc]
    """Buckets whose reduction passes the process's gate."""

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Start to reduce all buckets, now or when the gate opens. Communicates over the data-parallel ranks."""
        if self.reduction_gate.is_open:
            super().start_grad_sync(force_all_reduce)
        else:
            self.reduction_gate.hold(self, force_all_reduce)


def order_reductions(runtime: Runtime, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Send the overlapped reductions of these DDP modules through a gate. Returns the modules."""
    gate = ReductionGate()
    groups = [
        group
        for chunk in chunks
        for group in (*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ()))
        if group.ddp_config.overlap_grad_reduce
    ]
    for group in groups:
        specialize(group, OrderedBucketGroup)
        group.reduction_gate = gate
    if groups:
        runtime.add_parts(reductions=gate)
    return chunks


def begin_reductions(runtime: Runtime, chunks: Sequence[torch.nn.Module]) -> None:
    """Set the gate for a step, from its plan.

    Reductions of virtual stages, and of all stages except the first, begin after the last message of the step.

    Args:
        runtime: runtime of this process.
        chunks: model chunks of this process.
    """
    gate, step = runtime.parts.reductions, runtime.step.batch
    if gate is None:
        return
    assert step is not None, f"{step=}"
    is_first_stage = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    gate.is_open = False
    if len(chunks) == 1 and is_first_stage:
        gate.is_open = step.plan.fact(Overlaps(runtime.rank, runtime.hdp.expert_ranks))
