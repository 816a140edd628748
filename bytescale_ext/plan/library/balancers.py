"""Calls with which other frameworks balance a batch, with the inputs and outputs of their own functions.

They return indices of sequences for data-parallel ranks that run each sequence whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.hdp.packing import pack_best_fit
from bytescale_ext.plan.library.partition import Limits, partition


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Return ascending indices of each part, with equal sums of ``seqlen_list``, as the call of this name in verl.

    Args:
        seqlen_list: tokens or work of each sequence.
        k_partitions: number of parts; none is empty.
        equal_size: whether all parts have equally many sequences.

    Raises:
        ValueError: there are fewer sequences than parts, or equal parts need another number of sequences.
    """
    count = len(seqlen_list)
    if not 1 <= k_partitions <= count:
        raise ValueError(f"{count} sequences for {k_partitions} parts: each part needs at least 1")
    if equal_size and count % k_partitions:
        raise ValueError(f"{count} sequences do not divide into {k_partitions} equal parts")
    most = count // k_partitions if equal_size else count
    limits = Limits(k_partitions, most, equal_size, np.zeros(count, dtype=np.int64))
    parts = partition(np.array(seqlen_list, dtype=np.float64), limits)
    assert parts is not None, "parts without a capacity hold everything"
    return [np.flatnonzero(parts == part).tolist() for part in range(k_partitions)]


class BalancedPacker:
    """Packs sequences into bins of equal work under a capacity, with the ``pack`` call of NeMo-RL's packers.

    NeMo-RL deals bins to ranks in turn, so bins are sorted by their work, most work first.

    Args:
        bin_capacity: largest number of tokens of a bin.
        min_bin_count: fewest bins; None: 1.
        bin_count_multiple: divisor of the number of bins; None: 1.
        cost: cost of the model on one rank; None: the work is the number of tokens.
    """

    def __init__(
        self,
        bin_capacity: int,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        cost: CostModel | None = None,
    ) -> None:
        if bin_capacity < 1 or (bin_count_multiple or 1) < 1 or (min_bin_count or 0) < 0:
            raise ValueError(f"{bin_capacity=} {min_bin_count=} {bin_count_multiple=}: give positive numbers")
        self.bin_capacity = bin_capacity
        self.min_bin_count = min_bin_count or 1
        self.bin_count_multiple = bin_count_multiple or 1
        self.cost = cost

    def pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        """Return ascending indices of the sequences of each bin.

        Raises:
            ValueError: a sequence is empty or longer than a bin, or there are fewer sequences than bins.
        """
        lengths = [int(length) for length in sequence_lengths]
        packs = [sorted(pack) for pack in pack_best_fit(lengths, range(len(lengths)), self.bin_capacity)]
        count = max(len(packs), self.min_bin_count)
        count += -count % self.bin_count_multiple
        if count > len(lengths):
            raise ValueError(f"{len(lengths)} sequences do not fill {count} bins: each bin needs at least 1")
        sizes = np.array(lengths, dtype=np.int64)
        work = self._work(sizes.astype(np.float64))
        parts = partition(work, Limits(count, len(lengths), False, sizes, self.bin_capacity))
        if parts is None:  # dealt by work, the sequences do not fit: best fit does
            bins = _split_longest(packs, count)
        else:
            bins = [np.flatnonzero(parts == part).tolist() for part in range(count)]
        return sorted(bins, key=lambda one: (-float(work[one].sum()), one))

    def _work(self, tokens: np.ndarray) -> np.ndarray:
        """Return the work of sequences of these tokens: [n], as ``tokens``."""
        return tokens if self.cost is None else self.cost.a * self.cost.squares(tokens) + self.cost.b * tokens


def _split_longest(packs: list[list[int]], count: int) -> list[list[int]]:
    """Return ``count`` bins after halving packs, most sequences first."""
    bins = list(packs)
    while len(bins) < count:
        most = max(range(len(bins)), key=lambda index: len(bins[index]))
        items = bins[most]
        bins[most] = items[: len(items) // 2]
        bins.append(items[len(items) // 2 :])
    return bins
