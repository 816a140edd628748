"""Rings of ranks of unlike speeds: shares in proportion to the speeds where that pays, otherwise even shares.

With even shares a ring is as slow as its slowest rank. C bounds the share of a fast rank, so a ring whose ranks are all
full has even shares at any speed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.step.sizes import Cluster

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MIN_GAIN = 0.02  # shares are even unless uneven shares save this share of the ring's time


def proportional_shares(length: int, speeds: Floats, most: int) -> tuple[int, ...]:
    """Return the tokens of each rank of a ring, in proportion to its speed and at most ``most``; empty if even.

    Shares are even if uneven shares do not pay, or if a rank would hold no token.

    Args:
        length: tokens of the sequence, at most ``most`` for each rank.
        speeds: speed of each rank: [ranks].
        most: C.
    """
    if (speeds == speeds[0]).all():
        return ()
    is_full, ideal = np.zeros(len(speeds), dtype=np.bool_), speeds
    while not is_full.all():
        left = length - most * np.count_nonzero(is_full)
        ideal = np.where(is_full, most, left / speeds[~is_full].sum() * speeds)
        if not (ideal > most).any():
            break
        is_full |= ideal > most
    shares = np.minimum(np.floor(ideal).astype(np.int64), most)
    for _ in range(length - int(shares.sum())):
        shares[np.where(shares < most, (shares + 1) / speeds, np.inf).argmin()] += 1
    even = length / len(speeds) / speeds.min()
    if shares.min() < 1 or (shares / speeds).max() > (1 - _MIN_GAIN) * even:
        return ()
    return tuple(shares.tolist())


class RingSpeeds:
    """Speeds and shares of rings on the ranks of a cluster.

    Args:
        cluster: the ranks.
        is_uneven: whether rings may have uneven shares.
    """

    def __init__(self, cluster: Cluster, is_uneven: bool) -> None:
        self._speeds, self._most = cluster.rank_speeds(), cluster.tokens_per_rank
        self._is_equal, self._is_uneven = cluster.has_equal_speeds, is_uneven
        self._shares: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._slowest: dict[int, Floats] = {}

    def shares(self, first: int, width: int, length: int) -> tuple[int, ...]:
        """Return the tokens of each rank of a ring of a sequence of ``length`` tokens; empty if they are even."""
        if not self._is_uneven or width == 1 or length > width * self._most:
            return ()
        key = first, width, length
        if key not in self._shares:
            self._shares[key] = proportional_shares(length, self._speeds[first : first + width], self._most)
        return self._shares[key]

    def speeds(self, firsts: Ints, width: int, length: int) -> Floats:
        """Return ``speed`` of rings from each first rank: [rings], as ``firsts``."""
        if self._is_uneven and width > 1:
            return np.array([self.speed(first, width, length) for first in firsts.tolist()])
        if width not in self._slowest:
            self._slowest[width] = np.lib.stride_tricks.sliding_window_view(self._speeds, width).min(axis=1)
        return np.asarray(self._slowest[width][firsts])

    def speed(self, first: int, width: int, length: int) -> float:
        """Return the speed of equal ranks on which the ring takes as long."""
        if self._is_equal:
            return 1.0
        speeds = self._speeds[first : first + width]
        shares = self.shares(first, width, length)
        return length / width / float((np.array(shares) / speeds).max()) if shares else float(speeds.min())
