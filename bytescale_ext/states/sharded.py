"""A table of rows shared out over ranks, one owner a row: reads and updates are exchanges between all ranks of a group.

Every rank of the group calls each method equally often, whatever rows it needs. Host memory holds all of it, so the
group's backend is gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from bytescale_ext.states.rows import Answer, Push, RowTable


@dataclass(frozen=True, eq=False, slots=True)
class ShardedRows:
    """One rank's view of the whole table.

    Attributes:
        shard: the rows that this rank owns: ``len(shard.values)`` from that many times its rank on; equally many on all
            ranks, so the last rows may belong to nobody.
        group: the ranks that share the table.
    """

    shard: RowTable
    group: dist.ProcessGroup

    def answer(self, rows: np.ndarray, versions: np.ndarray, read_bound: int) -> Answer:
        """Return the rows int64 [n], ascending, that are newer than copies of these versions [n]; see ``RowTable``."""
        bounds = self._bounds(rows)
        asked_rows, asked_versions = (self._exchange(np.split(one, bounds[1:-1])) for one in (rows, versions))
        answers = [
            self.shard.answer(self._local(wanted), known, read_bound)
            for wanted, known in zip(asked_rows, asked_versions, strict=True)
        ]
        places = self._exchange([one.asked for one in answers])
        return Answer(
            np.concatenate([place + start for place, start in zip(places, bounds[:-1], strict=True)]),
            np.concatenate(self._exchange([one.values for one in answers])),
            np.concatenate(self._exchange([one.squares for one in answers])),
            np.concatenate(self._exchange([one.versions for one in answers])),
        )

    def apply(self, push: Push, rate: float) -> None:
        """Update the owners' rows with the pushes of all ranks, added up in the order of ranks."""
        order = np.argsort(push.rows)
        bounds = self._bounds(push.rows[order])
        columns = (push.rows, push.gradients, push.updates, push.squares)
        parts = (np.split(one[order], bounds[1:-1]) for one in columns)
        received = [self._exchange(one) for one in parts]
        pushes = [Push(self._local(rows), *others) for rows, *others in zip(*received, strict=True)]
        self.shard.apply(pushes, rate)

    def _bounds(self, rows: np.ndarray) -> np.ndarray:
        """Return where the rows of each owner begin among ascending rows [n], and n."""
        return np.searchsorted(rows, len(self.shard.values) * np.arange(self.group.size() + 1))

    def _local(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of rows [n] in this rank's shard."""
        return rows - self.group.rank() * len(self.shard.values)

    def _exchange(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Send part i [n, ...] to rank i; return what each rank has sent. Collective."""
        sent = torch.tensor([len(part) for part in parts])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        whole = torch.from_numpy(np.concatenate(parts))
        result = whole.new_empty((int(received.sum()), *whole.shape[1:]))
        dist.all_to_all_single(result, whole, received.tolist(), sent.tolist(), group=self.group)
        return np.split(result.numpy(), np.cumsum(received.numpy())[:-1])
