"""Order of the samples of a split over all epochs, shared by all loaders.

An epoch of up to ``SHUFFLE_LIMIT`` samples is a shuffled array. The array of a longer epoch would fill the memory of
every process, so its order is a function: a keyed permutation whose values are computed when they are needed.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import Final, Protocol

import numpy as np

SHUFFLE_LIMIT: Final = 1 << 20
"""Most samples of an epoch that is a shuffled array. Checkpoints record the limit, so it may change."""
NO_LIMIT: Final = 1 << 62
"""Limit of runs whose checkpoints record none: all epochs were shuffled arrays."""

_Keys = tuple[tuple[int, int], ...]
_PAIRS = 3  # of rounds
_BLOCK = 1 << 14  # values permuted at a time, so that they stay in the processor's cache
_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35  # odd factors of the round function
_WORD = (1 << 32) - 1


class SampleOrder(Protocol):
    """A permutation of the rows of an epoch, for each epoch."""

    def row(self, i: int) -> int:
        """Return the row of sample ``i``."""
        ...

    def rows(self, samples: np.ndarray) -> np.ndarray:
        """Return the rows of many samples: int64 [len(samples)]."""
        ...


def sample_order(num_rows: int, seed: int, split: int, limit: int = SHUFFLE_LIMIT) -> SampleOrder:
    """Return the order of a split: ``EpochOrder`` up to ``limit`` rows, else ``KeyedOrder``."""
    return EpochOrder(num_rows, seed, split) if num_rows <= limit else KeyedOrder(num_rows, seed, split)


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


class KeyedOrder:
    """Maps sample i to row ``i % n`` of a keyed permutation of epoch ``i // n``, computed for each sample alone.

    The permutation is a Feistel network over the numbers below the next power of two. Numbers of ``n`` and above are
    permuted again until they are below n (cycle walking; Black and Rogaway 2002, section 4), so the result is an exact
    permutation of n rows. Its keys depend only on the seed, the epoch and the split. Memory: none.

    Args:
        num_rows: number of samples of one epoch, at least 1 and below 2**62.
        seed: any integer.
        split: number of the split.
    """

    def __init__(self, num_rows: int, seed: int, split: int) -> None:
        assert 0 < num_rows < NO_LIMIT, f"{num_rows=}"
        self.num_rows = num_rows
        self._seed = (seed % 2**32, split)
        bits = max(2, (num_rows - 1).bit_length())
        self._low_bits, self._high_bits = bits // 2, bits - bits // 2

    def __reduce__(self) -> tuple[type[KeyedOrder], tuple[int, int, int]]:
        return KeyedOrder, (self.num_rows, *self._seed)

    def row(self, i: int) -> int:
        """Return the row of sample ``i``."""
        epoch, value = divmod(int(i), self.num_rows)
        keys = _round_keys(*self._seed, epoch)
        while True:
            low, high = value & (1 << self._low_bits) - 1, value >> self._low_bits
            for first, second in keys:
                high ^= _mixed(low, first, self._high_bits)
                low ^= _mixed(high, second, self._low_bits)
            value = high << self._low_bits | low
            if value < self.num_rows:
                return value

    def rows(self, samples: np.ndarray) -> np.ndarray:
        """Return the rows of many samples: int64 [len(samples)]."""
        samples = np.asarray(samples, dtype=np.int64)
        rows = np.empty(len(samples), dtype=np.int64)
        for start in range(0, len(samples), _BLOCK):
            block, result = samples[start : start + _BLOCK], rows[start : start + _BLOCK]
            first, last = int(block.min()) // self.num_rows, int(block.max()) // self.num_rows
            if first == last:
                result[:] = self._walked(block - first * self.num_rows, first)
                continue
            epochs = block // self.num_rows
            for epoch in range(first, last + 1):
                part = np.flatnonzero(epochs == epoch)
                result[part] = self._walked(block[part] - epoch * self.num_rows, epoch)
        return rows

    def _walked(self, values: np.ndarray, epoch: int) -> np.ndarray:
        """Return the rows of an epoch's values [n] below ``num_rows``."""
        keys = _round_keys(*self._seed, epoch)
        values = self._permuted(values, keys)
        outside = np.flatnonzero(values >= self.num_rows)
        while outside.size:
            values[outside] = self._permuted(values[outside], keys)
            outside = outside[values[outside] >= self.num_rows]
        return values

    def _permuted(self, values: np.ndarray, keys: _Keys) -> np.ndarray:
        """Return one pass of the network over values [n] below the power of two."""
        low = (values & ((1 << self._low_bits) - 1)).astype(np.uint32)
        high = (values >> self._low_bits).astype(np.uint32)
        mixed, shifted = np.empty_like(low), np.empty_like(low)
        for first, second in keys:
            _mix_into(high, low, first, self._high_bits, (mixed, shifted))
            _mix_into(low, high, second, self._low_bits, (mixed, shifted))
        return high.astype(np.int64) << self._low_bits | low


@lru_cache(maxsize=64)
def _round_keys(seed: int, split: int, epoch: int) -> _Keys:
    """Return the two 32-bit keys of each pair of rounds."""
    digest = hashlib.blake2b(struct.pack("<3q", seed, split, epoch), digest_size=8 * _PAIRS).digest()
    return tuple(struct.iter_unpack("<2I", digest))


def _mixed(value: int, key: int, bits: int) -> int:
    """Return ``bits`` bits; each bit depends on all bits of a value and a key."""
    value = (value ^ key) * _FIRST & _WORD
    value = (value ^ value >> 15) * _SECOND & _WORD
    return value >> 32 - bits


def _mix_into(
    target: np.ndarray, source: np.ndarray, key: int, bits: int, scratch: tuple[np.ndarray, np.ndarray]
) -> None:
    """Combine ``_mixed`` of the source [n] with the target [n]. All arrays are uint32; ``scratch``: two arrays [n]."""
    mixed, shifted = scratch
    np.bitwise_xor(source, np.uint32(key), out=mixed)
    np.multiply(mixed, np.uint32(_FIRST), out=mixed)
    np.right_shift(mixed, np.uint32(15), out=shifted)
    np.bitwise_xor(mixed, shifted, out=mixed)
    np.multiply(mixed, np.uint32(_SECOND), out=mixed)
    np.right_shift(mixed, np.uint32(32 - bits), out=mixed)
    np.bitwise_xor(target, mixed, out=target)
