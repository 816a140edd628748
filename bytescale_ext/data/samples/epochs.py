"""The order of the samples of a split, epoch after epoch, which all loaders share."""

from __future__ import annotations

import numpy as np


class EpochOrder:
    """Sample i is row ``i % n`` of the permutation of epoch ``i // n``, where n is the number of rows.

    The permutation depends only on the seed, the epoch and the split, so a resumed run sees the same samples on any
    number of ranks. It comes from ``numpy.random.RandomState``, whose stream is frozen, as in Megatron.

    Args:
        num_rows: samples of one epoch.
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
        epoch, place = divmod(int(i), self.num_rows)
        return int(self._order(epoch)[place])

    def rows(self, samples: np.ndarray) -> np.ndarray:
        """Return the rows of many samples: int64 [len(samples)]."""
        epochs, places = np.divmod(samples, max(1, self.num_rows))
        rows = np.zeros(len(samples), dtype=np.int64)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            rows[of_epoch] = self._order(int(epoch))[places[of_epoch]]
        return rows

    def _order(self, epoch: int) -> np.ndarray:
        """Return the permutation of one epoch. Keeps the last two, as a step may cross the end of an epoch."""
        for known, order in self._orders:
            if known == epoch:
                return order
        seed, split = self._seed
        order = np.arange(self.num_rows, dtype=np.int32 if self.num_rows < 2**31 else np.int64)
        np.random.RandomState([seed, epoch, split]).shuffle(order)
        # One assignment, so another thread sees the old pair or the new one; both are valid.
        self._orders = ((epoch, order), *self._orders[:1])
        return order
