"""Table of rows sharded over ranks: each row has one owner, and reads and updates are all-to-all exchanges.

Every rank of the group calls each method equally often, whichever rows it needs. All data is in host memory, so the
group's backend is gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from bytescale_ext.states.cache import RowCounts
from bytescale_ext.states.rows import Answer, Push, RowTable


@dataclass(frozen=True, eq=False, slots=True)
class ShardedRows:
    """Access of one rank to the whole table.

    Attributes:
        shard: rows that this rank owns. Rank r owns the rows from ``r * len(shard.values)`` on. All shards have equal
            size, so the last rows may be unused.
        group: ranks that share the table.
        counts: counts to which the updates that copies lack are added; None: they are not counted.
    """

    shard: RowTable
    group: dist.ProcessGroup
    counts: RowCounts | None = None

    def answer(self, rows: np.ndarray, versions: np.ndarray, read_bound: int) -> Answer:
        """Return the rows that are newer than the worker's copies; see ``RowTable.answer``. Collective.

        ``rows``: int64 [n], ascending; ``versions``: int64 [n].
        """
        bounds = self._bounds(rows)
        columns = (self._exchange(np.split(column, bounds[1:-1])) for column in (rows, versions))
        requests = [(self._local(rows), versions) for rows, versions in zip(*columns, strict=True)]
        if self.counts is not None:
            self.counts.num_lacking += sum(self.shard.lacking(*request, read_bound) for request in requests)
        answers = [self.shard.answer(*request, read_bound) for request in requests]
        positions = self._exchange([answer.asked for answer in answers])
        return Answer(
            np.concatenate([position + start for position, start in zip(positions, bounds[:-1], strict=True)]),
            np.concatenate(self._exchange([answer.values for answer in answers])),
            np.concatenate(self._exchange([answer.squares for answer in answers])),
            np.concatenate(self._exchange([answer.versions for answer in answers])),
        )

    def apply(self, push: Push, rate: float) -> None:
        """Update the owners' rows with the pushes of all ranks, summed in rank order. Collective."""
        order = np.argsort(push.rows)
        bounds = self._bounds(push.rows[order])
        columns = (push.rows, push.gradients, push.updates, push.squares)
        received = [self._exchange(np.split(column[order], bounds[1:-1])) for column in columns]
        pushes = [Push(self._local(rows), *others) for rows, *others in zip(*received, strict=True)]
        self.shard.apply(pushes, rate)

    def _bounds(self, rows: np.ndarray) -> np.ndarray:
        """Return the index of each owner's first row among ascending rows [n], followed by n: [ranks + 1]."""
        return np.searchsorted(rows, len(self.shard.values) * np.arange(self.group.size() + 1))

    def _local(self, rows: np.ndarray) -> np.ndarray:
        """Return the indices in this rank's shard of rows [n]."""
        return rows - self.group.rank() * len(self.shard.values)

    def _exchange(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Send part i, [n, ...], to rank i, and return the part received from each rank. Collective."""
        sent = torch.tensor([len(part) for part in parts])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        source = torch.from_numpy(np.concatenate(parts))
        result = source.new_empty((int(received.sum()), *source.shape[1:]))
        dist.all_to_all_single(result, source, received.tolist(), sent.tolist(), group=self.group)
        return np.split(result.numpy(), np.cumsum(received.numpy())[:-1])
