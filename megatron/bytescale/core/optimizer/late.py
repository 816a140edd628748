"""All updates are in the parameters before Megatron saves them or evaluates with them.

Between steps of training parameters lack the last gradients while updates run beside training. Megatron turns each
chunk of the model to evaluation before it evaluates, and frees the chunk's buffers of gathered parameters before each
save, both on all ranks. A chunk takes these calls as the sign to wait for its updates and to gather the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bytescale_ext.states.lock_free import LockFreeAdam

if TYPE_CHECKING:
    import torch
    from megatron.core.distributed import DistributedDataParallel


class LateUpdates:
    """The updates of all parts of one rank's optimizer that run beside training."""

    def __init__(self, parts: Sequence[LockFreeAdam]) -> None:
        self._parts = parts

    @property
    def missing(self) -> int:
        """Steps whose gradients the parameters lack; equal on all ranks that have parameters."""
        return max((part.missing for part in self._parts), default=0)

    @property
    def wait_seconds(self) -> float:
        """How long steps have waited for updates so far."""
        return sum(part.wait_seconds for part in self._parts)

    def flush(self) -> None:
        """Take all updates. Raises OSError or PagesDamaged where a disk fails."""
        for part in self._parts:
            part.flush()


def flushing(kind: type[DistributedDataParallel]) -> type[DistributedDataParallel]:
    """Return the class that a DDP module becomes whose ``late_updates`` are flushed before it is saved or evaluated.

    Ranks that share the optimizer then gather the parameters of the module. Collective on them.
    """

    class Flushing(kind):  # type: ignore[misc,valid-type]
        def train(self, mode: bool = True) -> torch.nn.Module:
            """Flush before an evaluation."""
            if not mode:
                self._flush()
            return super().train(mode)

        def free_overlap_buffers(self) -> None:
            """Flush before a save."""
            self._flush()
            super().free_overlap_buffers()

        def _flush(self) -> None:
            self.late_updates.flush()
            if self.ddp_config.use_distributed_optimizer:
                self.start_param_sync(force_sync=True)

    return Flushing


def flush_first(chunks: Sequence[DistributedDataParallel], late_updates: LateUpdates) -> None:
    """Have these DDP modules flush before they are saved or evaluated."""
    for chunk in chunks:
        chunk.__class__, chunk.late_updates = flushing(type(chunk)), late_updates
