"""N-gram memory with its tables in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from bytescale_ext.data.loading.step import StepBatch
from megatron.bytescale.core.models.common.embeddings.host_table import HostTable
from megatron.bytescale.core.models.common.embeddings.ngram_memory import NgramMemory

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict


class HostNgramMemory(NgramMemory):
    """The memory of one layer, with its table outside the model's parameters.

    Attributes:
        host: table of rows in host memory.
    """

    def make_table(self) -> None:
        """Initialize this rank's rows."""
        settings = self.settings
        assert settings.host is not None, f"{settings=}"
        device = torch.device(torch.cuda.current_device())
        self.host = HostTable(settings.host, settings.rule.num_rows, self.drawn_rows, device)

    def values_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values [t, columns, dim] of rows [t, columns] of the current step."""
        return self.host.values_of(rows).to(self.key.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """Return the sharded checkpoint's entries, including this rank's rows. Collective."""
        sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return sharded | self.host.sharded_entries(prefix, self.place_among_layers() if sharded_offsets else ())

    def _load_from_state_dict(self, state_dict: dict[str, torch.Tensor], prefix: str, *others: object) -> None:
        """Load this rank's rows and the other parameters."""
        self.host.load(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)


def gram_rows_of(step: StepBatch) -> np.ndarray:
    """Return the rows int64 [n] that a step's n-grams use on this rank, ascending and with the padding row."""
    of_units = [unit.gram_rows for unit in step.micro_batches if unit.gram_rows is not None]
    return np.unique(np.concatenate([np.zeros(1, np.int64), *(rows.numpy().ravel() for rows in of_units)]))
