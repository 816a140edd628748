"""What a cache of table rows saves on given token ids, counted by running the cache itself with rows of one number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.states.cache import CacheSettings, RowCache
from bytescale_ext.states.rows import Push, RowTable

CLOCK_BYTES: Final = 16
"""Of a row's number and its version, which are sent for every row that is asked for or pushed."""
FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class CacheTraffic:
    """What all workers have read and sent over the steps.

    Attributes:
        num_steps: how many steps.
        num_read: rows of batches, each once in a batch; without a cache each is fetched and its gradient pushed.
        num_fetched: rows that came from the table.
        num_pushed: rows whose gradients went to it.
        num_staged: rows that were fetched while the step before was computed.
    """

    num_steps: int
    num_read: int
    num_fetched: int
    num_pushed: int
    num_staged: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of reads that needed no row of the table."""
        return 1.0 - self.num_fetched / self.num_read

    @property
    def waited(self) -> float:
        """Share of reads for which a step waits, because their rows were not fetched ahead or have changed since."""
        return (self.num_fetched - self.num_staged) / self.num_read

    @property
    def saved(self) -> float:
        """Share of the rows, fetched and pushed, that a run without a cache would also send."""
        return 1.0 - (self.num_fetched + self.num_pushed) / (2 * self.num_read)

    def step_bytes(self, dim: int) -> float:
        """Return the bytes that all workers send and receive in a step, for rows of ``dim`` float32 numbers."""
        rows = self.num_fetched + self.num_pushed
        return (rows * (dim + 1) * FLOAT_BYTES + (self.num_read + self.num_pushed) * CLOCK_BYTES) / self.num_steps


def step_rows(
    rule: GramRule, documents: Iterator[np.ndarray], num_workers: int, num_tokens: int
) -> Iterator[list[np.ndarray]]:
    """Yield for each step the rows int64 [n] of each worker's batch, each once.

    Batches are packs of ``num_tokens`` tokens, filled with documents (ids [t]) in order; a last step that is not full
    is left out.
    """
    waiting: list[np.ndarray] = []
    num_waiting, wanted = 0, num_tokens * num_workers
    for document in documents:
        waiting.append(rule.rows_of(document))
        num_waiting += len(document)
        if num_waiting < wanted:
            continue
        rows = np.concatenate(waiting)
        full = num_waiting // wanted * wanted
        for begin in range(0, full, wanted):
            yield [np.unique(part) for part in np.split(rows[begin : begin + wanted], num_workers)]
        waiting, num_waiting = [rows[full:]], num_waiting - full


def measure_traffic(
    steps: Sequence[Sequence[np.ndarray]], num_rows: int, settings: CacheSettings, ahead: bool = False
) -> CacheTraffic:
    """Run the workers of all steps and count their rows.

    Args:
        steps: the rows [n] of each worker's batch, each once.
        num_rows: of the table.
        settings: of each worker's cache.
        ahead: rows of the next step are fetched while a step is computed, as in training.
    """
    table = RowTable(np.zeros((num_rows, 1), np.float32), np.zeros(num_rows, np.float32), np.zeros(num_rows, np.int64))
    caches = [RowCache(settings, num_rows, 1) for _ in steps[0]]
    for number, batches in enumerate(steps):
        for cache, rows in zip(caches, batches, strict=True):
            cache.lookup(rows, table, 0.0)
        for following in steps[number + 1 : number + 2] if ahead else ():
            for cache, rows in zip(caches, following, strict=True):
                cache.stage(rows, table)
        pushes: list[Push] = [
            cache.update(rows, np.zeros((len(rows), 1), np.float32), 0.0)
            for cache, rows in zip(caches, batches, strict=True)
        ]
        table.apply(pushes, 0.0)
    counted = [cache.traffic for cache in caches]
    return CacheTraffic(
        len(steps),
        sum(one.num_read for one in counted),
        sum(one.num_fetched for one in counted),
        sum(one.num_pushed for one in counted),
        sum(one.num_staged for one in counted),
    )
