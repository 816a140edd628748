"""N-gram memory whose tables are in host memory, one owner a row, with a cache of rows on each rank (HET).

The rows of a step are known when it begins, and they change only when it ends. So a rank fetches what its cache lacks
before the first forward pass, and sends gradients after the last backward pass: each an exchange between the ranks of a
stage, which all of them join. Nothing is exchanged inside a step, where ranks run different numbers of micro-batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from torch.nn import functional

from bytescale_ext.data.loading.step import StepBatch
from bytescale_ext.states.cache import RowCache
from bytescale_ext.states.sharded import ShardedRows
from megatron.bytescale.core.models.common.embeddings.ngram_memory import NgramMemory


class HostNgramMemory(NgramMemory):
    """The memory before one layer, with its table outside the model, DDP and Megatron's optimizer.

    Tensor-parallel ranks hold equal tables, and take equal steps.
    """

    def make_table(self) -> None:
        """Draw this rank's rows."""
        group = parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)
        own_rows = -(-self.settings.rule.num_rows // group.size())
        first = group.rank() * own_rows
        self._rows = ShardedRows(self.drawn_rows(range(first, first + own_rows)), group)
        self._empty_cache()

    def _empty_cache(self) -> None:
        assert self.settings.host is not None, f"{self.settings=}"
        self._cache = RowCache(self.settings.host.cache, self.settings.rule.num_rows, self.settings.dim)
        self._rate = self.settings.host.rate

    def begin_step(self, rows: np.ndarray, training: bool) -> None:
        """Read the rows int64 [n] of a step, ascending. Collective."""
        values = self._cache.lookup(rows, self._rows, self._rate)
        if not training:  # rows that made room are sent, as after a step
            self._send(rows[:0], values[:0])
        self._step_rows = rows
        self._names = torch.from_numpy(rows).to(self.key.device)
        self._values = torch.from_numpy(values).to(self.key.device).requires_grad_()

    def values_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values [t, columns, dim] of rows [t, columns] of the running step."""
        return functional.embedding(torch.searchsorted(self._names, rows), self._values).to(self.key.dtype)

    def end_step(self, num_labels: torch.Tensor) -> None:
        """Take the step's gradients, divided by its labels (a scalar), and send those that are due. Collective."""
        gradient = self._values.grad
        assert gradient is not None, f"{self._values.shape=}"
        if self.config.sequence_parallel:
            torch.distributed.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        self._send(self._step_rows, (gradient / num_labels).cpu().numpy())

    def _send(self, rows: np.ndarray, gradients: np.ndarray) -> None:
        """Put the gradients [n, dim] of rows [n] into the cache and send what is due. Collective."""
        self._rows.apply(self._cache.update(rows, gradients, self._rate), self._rate)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the entries of a sharded checkpoint, with this rank's rows. Sends all updates first; collective."""
        self._rows.apply(self._cache.flush(self._rate), self._rate)
        sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        among = self.place_among_layers() if sharded_offsets else ()
        group, shard = self._rows.group, self._rows.shard
        for name, values in (("rows", shard.values), ("squares", shard.squares)):
            sharded[prefix + name] = ShardedTensor.from_rank_offsets(
                prefix + name,
                torch.from_numpy(values),
                *among,
                (len(among), group.rank(), group.size()),
                replica_id=parallel_state.get_tensor_model_parallel_rank(),
                prepend_axis_num=len(among),
                allow_shape_mismatch=True,  # on other ranks other rows at the end belong to nobody
            )
        return sharded

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load this rank's rows, and forget those in the cache."""
        shard = self._rows.shard
        for name, values in (("rows", shard.values), ("squares", shard.squares)):
            values[...] = state_dict.pop(prefix + name).numpy()
        shard.versions[:] = 0
        self._empty_cache()
        super()._load_from_state_dict(state_dict, prefix, *others)


class HostMemories:
    """The memories of one process, and the step that they have rows of."""

    def __init__(self) -> None:
        self._memories: list[HostNgramMemory] = []
        self._step: StepBatch | None = None

    def collect(self, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """``ModelConfig.pre_wrap_hooks``: find the memories of all model chunks."""
        for chunk in model_chunks:
            self._memories += [part for part in chunk.modules() if isinstance(part, HostNgramMemory)]
        return model_chunks

    def begin(self, step: StepBatch, training: bool) -> None:
        """Read the rows of a step before its first forward pass; later calls of the step do nothing. Collective."""
        if step is self._step:
            return
        self._step = step
        of_units = (unit.gram_rows for unit in step.micro_batches)
        padding = np.zeros(1, np.int64)
        rows = np.unique(np.concatenate([padding, *(one.numpy().ravel() for one in of_units if one is not None)]))
        for memory in self._memories:
            memory.begin_step(rows, training)

    def end(self, num_labels: torch.Tensor) -> None:
        """Send the gradients of the step, which has this number of labels (a scalar). Collective."""
        for memory in self._memories:
            memory.end_step(num_labels)
