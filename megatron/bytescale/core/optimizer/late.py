"""Finishes asynchronous updates before Megatron saves or evaluates the parameters.

While updates run concurrently with training, parameters lack the last gradients. Before an evaluation Megatron switches
each chunk of the model to evaluation mode. Before each save it frees the chunk's buffers of gathered parameters. Both
happen on all ranks. On either call a chunk waits for its updates and gathers the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from bytescale_ext.states.lock_free import LockFreeAdam
from megatron.bytescale.registry import specialize

if TYPE_CHECKING:
    import torch
    from megatron.core.distributed import DistributedDataParallel


class LateUpdates:
    """The asynchronous updates of all parts of one rank's optimizer."""

    def __init__(self, parts: Sequence[LockFreeAdam]) -> None:
        self._parts = parts

    @property
    def missing(self) -> int:
        """Number of steps whose gradients the parameters lack; equal on all ranks that have parameters."""
        return max((part.missing for part in self._parts), default=0)

    @property
    def wait_seconds(self) -> float:
        """Total time that steps have waited for updates, in seconds."""
        return sum(part.wait_seconds for part in self._parts)

    def flush(self) -> None:
        """Apply all updates. Raises OSError or PagesDamaged if a disk fails."""
        for part in self._parts:
            part.flush()


@cache
def flushing(kind: type[DistributedDataParallel]) -> type[DistributedDataParallel]:
    """Return the subclass of a DDP module that flushes its ``late_updates`` before it is saved or evaluated.

    Ranks that share the optimizer then gather the module's parameters, which is a collective.
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
    """Make these DDP modules flush before they are saved or evaluated."""
    for chunk in chunks:
        specialize(chunk, flushing)
        chunk.late_updates = late_updates
