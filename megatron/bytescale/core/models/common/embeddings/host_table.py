"""Tables of rows in host memory, with one owner per row and a row cache on each rank (HET, Miao et al. 2021).

The rows of a step are known when it begins, and they change only when it ends. So a rank reads them before the first
forward pass and sends gradients after the last backward pass. Both are exchanges that all ranks of a stage join. Within
a step ranks run different numbers of micro-batches. Meanwhile a thread fetches the rows that the cache lacks for the
next step, which overlaps with computation. The read at the next step's start then transfers only rows that have changed
since.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from torch.nn import functional

from bytescale_ext.config.memory.tables import HostTables
from bytescale_ext.data.loading.step import StepBatch
from bytescale_ext.measure.metrics import RankStep
from bytescale_ext.parallel.upload import upload
from bytescale_ext.states.cache import RowCache
from bytescale_ext.states.rows import RowTable
from bytescale_ext.states.sharded import ShardedRows

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class HostTable:
    """One table of a module, outside the model's parameters, DDP and Megatron's optimizer.

    The HDP ranks of a stage share out the rows. Tensor-parallel ranks hold equal copies and apply equal updates.

    Attributes:
        settings: cache settings and learning rate.
        num_rows: number of rows of the whole table.
        device: device that holds the rows of a step.
    """

    def __init__(
        self, settings: HostTables, num_rows: int, own_rows: Callable[[range], RowTable], device: torch.device
    ) -> None:
        """Make this rank's part. ``own_rows``: returns initial rows, also for indices beyond ``num_rows``."""
        self.settings, self.num_rows, self.device = settings, num_rows, device
        group = parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)
        share = -(-num_rows // group.size())
        self._rows = ShardedRows(own_rows(range(group.rank() * share, (group.rank() + 1) * share)), group)
        self._empty_cache()

    def _empty_cache(self) -> None:
        self._cache = RowCache(self.settings.cache, self.num_rows, self._rows.shard.values.shape[1])
        self._rows = replace(self._rows, counts=self._cache.traffic)
        self._taken = RankStep()

    def begin_step(self, rows: np.ndarray, training: bool, step_index: int) -> None:
        """Read the rows int64 [n] of a step, in ascending order. Collective."""
        if training:
            self._cache.settings = self.settings.cache_in(step_index)
        values = torch.from_numpy(self._cache.lookup(rows, self._rows, self.settings.rate))
        if not training:  # rows that left the cache are sent, as after a training step
            self._send(rows[:0], values[:0].numpy())
            self.take_counts()  # of evaluation
        self._step_rows = rows
        self._names = upload(torch.from_numpy(rows), self.device)
        self._values = upload(values, self.device).requires_grad_()

    def stage(self, rows: np.ndarray, group: torch.distributed.ProcessGroup) -> None:
        """Prefetch the next step's rows int64 [n], ascending, over a separate group of the same ranks. Collective."""
        self._cache.stage(rows, replace(self._rows, group=group, counts=None))

    def values_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values float32 [..., dim] of rows int64 [...] of the current step."""
        return functional.embedding(torch.searchsorted(self._names, rows), self._values)

    def end_step(self, num_labels: torch.Tensor, sequence_parallel: bool) -> None:
        """Take the step's gradients, divided by its number of labels (a scalar); send the rows due. Collective."""
        gradient = self._values.grad
        assert gradient is not None, f"{self._values.shape=}"
        if sequence_parallel:  # each tensor-parallel rank has only its own tokens' gradients
            torch.distributed.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        self._send(self._step_rows, (gradient / num_labels).cpu().numpy())

    def take_counts(self) -> RankStep:
        """Return the rows read and fetched since the last call, and the updates that copies of own rows lacked."""
        counts, taken = self._cache.traffic, self._taken
        self._taken = RankStep(
            rows_read=counts.num_read, rows_fetched=counts.num_missed, updates_lacking=counts.num_lacking
        )
        return RankStep(
            rows_read=counts.num_read - taken.rows_read,
            rows_fetched=counts.num_missed - taken.rows_fetched,
            updates_lacking=counts.num_lacking - taken.updates_lacking,
        )

    def _send(self, rows: np.ndarray, gradients: np.ndarray) -> None:
        """Add the gradients [n, dim] of rows [n] to the cache and send the rows that are due. Collective."""
        self._rows.apply(self._cache.update(rows, gradients, self.settings.rate), self.settings.rate)

    def sharded_entries(self, prefix: str, place: tuple[tuple[int, int, int], ...] = ()) -> dict[str, ShardedTensor]:
        """Return this rank's rows for a sharded checkpoint, after sending all updates. Collective.

        ``place``: (axis, index, count) of this table among the tables of other layers under the same names.
        """
        self._rows.apply(self._cache.flush(self.settings.rate), self.settings.rate)
        group, shard = self._rows.group, self._rows.shard
        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                prefix + name,
                torch.from_numpy(values),
                *place,
                (len(place), group.rank(), group.size()),
                replica_id=parallel_state.get_tensor_model_parallel_rank(),
                prepend_axis_num=len(place),
                allow_shape_mismatch=True,  # the number of padding rows depends on the number of ranks
            )
            for name, values in (("rows", shard.values), ("squares", shard.squares))
        }

    def load(self, state_dict: dict[str, torch.Tensor], prefix: str) -> None:
        """Load this rank's rows [n, dim] and their squared gradients [n] from a state, and empty the cache."""
        shard = self._rows.shard
        for name, values in (("rows", shard.values), ("squares", shard.squares)):
            values[...] = state_dict.pop(prefix + name).numpy()
        shard.versions[:] = 0
        self._empty_cache()


class HasHostTable(Protocol):
    """A module with a table in host memory."""

    config: TransformerConfig
    host: HostTable


class TablesOfStep:
    """All tables of one process. One thread prefetches for all of them, in the same order on every rank.

    Args:
        rows_of: kind of module with a table -> function that returns the rows int64 [n] that these modules read in a
            step, ascending, at least one row.
    """

    def __init__(self, rows_of: Mapping[type[torch.nn.Module], Callable[[StepBatch], np.ndarray]]) -> None:
        self._rows_of = rows_of
        self._modules: dict[type[torch.nn.Module], list[HasHostTable]] = {kind: [] for kind in rows_of}
        self._step: StepBatch | None = None
        self._ahead: Future[None] | None = None
        self._group_ahead: torch.distributed.ProcessGroup | None = None

    def collect(self, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Hook in ``ModelConfig.pre_wrap_hooks``: collect the tables of all chunks. Collective on a stage's ranks."""
        for chunk in model_chunks:
            for kind, modules in self._modules.items():
                modules += [cast("HasHostTable", part) for part in chunk.modules() if isinstance(part, kind)]
        group = parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)
        if any(self._modules.values()) and group.size() > 1:
            ranks: Sequence[int] = torch.distributed.get_process_group_ranks(group)
            self._group_ahead = torch.distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return model_chunks

    def begin(self, step: StepBatch, training: bool, next_step: Callable[[], StepBatch | None] | None = None) -> None:
        """Read the rows of a step before its first forward pass; repeated calls do nothing. Collective.

        ``next_step``: waits for the next step and returns it, or None at the end of the data. A thread calls it once
        and prefetches that step's rows.
        """
        if step is self._step:
            return
        self._step = step
        for modules, rows in self._with_rows(step):
            for module in modules:
                module.host.begin_step(rows, training, step.step_index)
        if training and next_step is not None and self._group_ahead is not None:
            self._ahead = in_thread(lambda: self._stage(next_step()))

    def _with_rows(self, step: StepBatch | None) -> Iterator[tuple[list[HasHostTable], np.ndarray]]:
        """Yield the modules of each kind with their rows int64 [n] of a step; no rows without a step."""
        for kind, modules in self._modules.items():
            if modules:
                yield modules, np.empty(0, np.int64) if step is None else self._rows_of[kind](step)

    def _stage(self, step: StepBatch | None) -> None:
        """Prefetch the rows of a step, or join the exchanges with no rows if there is no step. Collective."""
        assert self._group_ahead is not None
        for modules, rows in self._with_rows(step):
            for module in modules:
                module.host.stage(rows, self._group_ahead)

    def end(self, num_labels: torch.Tensor) -> RankStep:
        """Send the step's gradients, divided by its number of labels (a scalar). Collective.

        Returns the counts of rows of all tables in this step.
        """
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None
        for module in itertools.chain.from_iterable(self._modules.values()):
            module.host.end_step(num_labels, module.config.sequence_parallel)
        tables = itertools.chain.from_iterable(self._modules.values())
        return sum((module.host.take_counts() for module in tables), RankStep())


def in_thread(work: Callable[[], None]) -> Future[None]:
    """Run ``work`` in a daemon thread; the future's result raises the thread's error."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as error:  # ``Future.result`` raises it again
            future.set_exception(error)

    threading.Thread(target=run, name="bytescale-rows", daemon=True).start()
    return future
