"""Traffic of a cache of table rows for given token ids, counted by running the cache with rows of width 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.states.cache import CacheSettings, RowCache
from bytescale_ext.states.rows import Push, RowTable

CLOCK_BYTES: Final = 16
"""Bytes of a row's number and version, which are sent for every row that is requested or pushed."""
FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class CacheTraffic:
    """Number of rows that all workers have read and transferred.

    Attributes:
        num_steps: number of steps.
        num_read: rows of batches, counted once per batch. Without a cache each is fetched and its gradient pushed.
        num_fetched: rows fetched from the table.
        num_pushed: rows whose updates were sent to the table.
        num_staged: rows that were fetched during the step before the step that reads them.
    """

    num_steps: int
    num_read: int
    num_fetched: int
    num_pushed: int
    num_staged: int = 0

    @property
    def hit_rate(self) -> float:
        """Fraction of reads that needed no row of the table."""
        return 1.0 - self.num_fetched / self.num_read

    @property
    def wait_rate(self) -> float:
        """Fraction of reads that make a step wait, because the row was not staged or has changed since."""
        return (self.num_fetched - self.num_staged) / self.num_read

    @property
    def saving(self) -> float:
        """Fraction of the transfers of a run without a cache that the cache saves."""
        return 1.0 - (self.num_fetched + self.num_pushed) / (2 * self.num_read)

    def step_bytes(self, dim: int) -> float:
        """Return the bytes that all workers send and receive per step, for rows of ``dim`` float32 numbers."""
        rows = self.num_fetched + self.num_pushed
        return (rows * (dim + 1) * FLOAT_BYTES + (self.num_read + self.num_pushed) * CLOCK_BYTES) / self.num_steps


def step_rows(
    rule: GramRule, documents: Iterator[np.ndarray], num_workers: int, num_tokens: int
) -> Iterator[list[np.ndarray]]:
    """Yield the unique rows, int64 [n], of each worker's batch, step by step.

    A batch is a pack of ``num_tokens`` tokens of consecutive documents. A last, incomplete step is dropped.

    Args:
        rule: rule that hashes tokens to rows.
        documents: token ids of each document, [t].
        num_workers: number of batches per step.
        num_tokens: tokens of a batch.
    """
    unused: list[np.ndarray] = []
    num_unused, step_tokens = 0, num_tokens * num_workers
    for document in documents:
        unused.append(rule.rows_of(document))
        num_unused += len(document)
        if num_unused < step_tokens:
            continue
        rows = np.concatenate(unused)
        full = num_unused // step_tokens * step_tokens
        for begin in range(0, full, step_tokens):
            yield [np.unique(part) for part in np.split(rows[begin : begin + step_tokens], num_workers)]
        unused, num_unused = [rows[full:]], num_unused - full


def measure_traffic(
    steps: Sequence[Sequence[np.ndarray]], num_rows: int, settings: CacheSettings, ahead: bool = False
) -> CacheTraffic:
    """Run the caches of all workers over all steps, and count the rows that they transfer.

    Args:
        steps: unique rows [n] of each worker's batch, by step.
        num_rows: number of rows of the table.
        settings: size and bounds of each worker's cache.
        ahead: whether the rows of the next step are fetched during a step, as in training.
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
    return CacheTraffic(
        len(steps),
        sum(cache.traffic.num_read for cache in caches),
        sum(cache.traffic.num_fetched for cache in caches),
        sum(cache.traffic.num_pushed for cache in caches),
        sum(cache.traffic.num_staged for cache in caches),
    )
