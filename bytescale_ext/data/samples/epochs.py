"""Order of the samples of a split over all epochs, shared by all loaders."""

from __future__ import annotations

import numpy as np


class EpochOrder:
    """Maps sample i to row ``i % n`` of the permutation of epoch ``i // n``, where n is the number of rows.

    The permutation depends only on the seed, the epoch and the split, so a resumed run reads the same samples on any
    number of ranks. As in Megatron it comes from ``numpy.random.RandomState``, whose stream never changes.

    Args:
        num_rows: number of samples of one epoch.
        seed: any integer.
        split: number of the split.
    """

    def __init__(self, num_rows: int, seed: int, split: int) -> None:
        self.num_rows = num_rows
        self._seed = (seed % 2**32, split)
        self._orders: tuple[tuple[int, np.ndarray], ...] = ()

    def __reduce__(self) -> tuple[type[EpochOrder], tuple[int, int, int]]:
        return EpochOrder, (self.num_rows, *self._seed)

    def row(self, i: int) -> int:
        """Return the row of sample ``i``."""
        epoch, index = divmod(int(i), self.num_rows)
        return int(self._order(epoch)[index])

    def rows(self, samples: np.ndarray) -> np.ndarray:
        """Return the rows of many samples: int64 [len(samples)]."""
        epochs, indices = np.divmod(samples, max(1, self.num_rows))
        rows = np.zeros(len(samples), dtype=np.int64)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            rows[in_epoch] = self._order(int(epoch))[indices[in_epoch]]
        return rows

    def _order(self, epoch: int) -> np.ndarray:
        """Return the permutation of one epoch. The last two are cached, because a step may span two epochs."""
        for known, order in self._orders:
            if known == epoch:
                return order
        seed, split = self._seed
        order = np.arange(self.num_rows, dtype=np.int32 if self.num_rows < 2**31 else np.int64)
        np.random.RandomState([seed, epoch, split]).shuffle(order)
        # A single assignment, so that another thread sees either the old or the new pair; both are valid.
        self._orders = ((epoch, order), *self._orders[:1])
        return order
