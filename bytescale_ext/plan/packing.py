"""Best-fit-decreasing packing of short sequences into packs (ByteScale section 5, Algorithm 1, line "pack")."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

_WORD_BITS = 1024


class _ResidualSet:
    """A set of small integers that answers "the smallest member >= x" in a few integer operations.

    Two levels of bit sets: bit v of word w stands for the member ``w * _WORD_BITS + v``; the top level has a bit
    for each word that is not zero. A sorted list with bisect would move up to ``capacity`` entries at every change.
    """

    def __init__(self) -> None:
        self._words: dict[int, int] = {}
        self._top = 0

    def add(self, member: int) -> None:
        word, bit = divmod(member, _WORD_BITS)
        self._words[word] = self._words.get(word, 0) | (1 << bit)
        self._top |= 1 << word

    def remove(self, member: int) -> None:
        word, bit = divmod(member, _WORD_BITS)
        self._words[word] ^= 1 << bit
        if not self._words[word]:
            self._top ^= 1 << word

    def smallest_from(self, bound: int) -> int | None:
        """The smallest member that is at least ``bound``; None when there is none."""
        word, bit = divmod(bound, _WORD_BITS)
        rest = self._words.get(word, 0) >> bit
        if rest:
            return bound + (rest & -rest).bit_length() - 1
        later = self._top >> (word + 1)
        if not later:
            return None
        word += (later & -later).bit_length()
        bits = self._words[word]
        return word * _WORD_BITS + (bits & -bits).bit_length() - 1


def pack_best_fit(lengths: Sequence[int], indices: Iterable[int], capacity: int) -> tuple[tuple[int, ...], ...]:
    """Pack sequences into as few packs of ``capacity`` tokens as best-fit-decreasing finds.

    Longer sequences go first (tie: lower index). Each goes to the fullest pack that still has room for it
    (tie: the oldest pack), else it opens a new pack. About O(n log n).

    Args:
        lengths: tokens of every sequence of the step.
        indices: which of them to pack, each at most once.
        capacity: the most tokens of one pack.

    Returns:
        Packs in the order in which they were opened, each the indices it holds in the order of placement.

    Raises:
        ValueError: a sequence is empty or longer than ``capacity``.
    """
    sizes = [int(length) for length in lengths]
    order = sorted(sorted(indices), key=sizes.__getitem__, reverse=True)  # stable, also in reverse
    if order and sizes[order[0]] > capacity:
        raise ValueError(
            f"sequence {order[0]} has {sizes[order[0]]} tokens, more than a pack of {capacity} tokens holds; "
            f"raise the capacity or cut the sequence"
        )
    if order and sizes[order[-1]] < 1:
        raise ValueError(f"sequence {order[-1]} has {sizes[order[-1]]} tokens; drop it, a sequence needs at least 1")
    packs: list[list[int]] = []
    residuals = _ResidualSet()
    packs_with: dict[int, list[int]] = {}  # residual -> heap of the packs that have it, oldest first
    for index in order:
        length = sizes[index]
        residual = residuals.smallest_from(length)
        if residual is None:
            pack, residual = len(packs), capacity
            packs.append([index])
        else:
            heap = packs_with[residual]
            pack = heapq.heappop(heap)
            if not heap:
                residuals.remove(residual)
            packs[pack].append(index)
        residual -= length
        if not residual:
            continue
        heap = packs_with.setdefault(residual, [])
        if not heap:
            residuals.add(residual)
        heapq.heappush(heap, pack)
    return tuple(tuple(pack) for pack in packs)
