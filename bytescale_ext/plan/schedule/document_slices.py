"""Slices of micro-batches of documents and ring shards, which a pipeline runs one after another.

``slices.py`` slices samples of one length. Here each ring sequence is divided separately into parts of equal cost. The
local documents of a rank are divided together, end to end on a line. Slice j of a micro-batch holds part j of each::

    ring shards   | A0          | A1       | A2      |       A0: tokens [0, end 0) of A, shared by A's ring
                  | B0          | B1       | B2      |
    local line    | doc  doc  do|c  doc  do|c  doc   |       a document may continue in the next slice

The ends of a ring sequence depend on its length and the width of its ring, so all ranks divide it alike. All ends
except the last are multiples of 2D tokens for D ranks. So each rank gets equal front and back parts of every slice
except the last, and holds as many tokens of the sequence as without slices.

A slice attends to all earlier slices. There are two ways to provide their keys. Either the keys travel round the ring
again with each slice, and each rank stores only its own keys. Or each rank keeps all keys that it has received, and
only the keys of the new slice travel. This moves ``2 / (k + 1)`` of the bytes and stores D times the keys, so it is
done for sequences up to a given length. Up to ``affordable_tokens``, slices free more memory than kept keys need.

Each rank sums the gradients of kept keys until their slice runs backward. Or the gradients travel to their own rank
with each slice, and each rank stores a third of the bytes. Kept keys may also be stored in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.schedule.actions import most_slices
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.sizes import Slicing


@dataclass(frozen=True, slots=True)
class DocumentSlices:
    """The slices of one rank's micro-batch.

    Attributes:
        micro_batch: ring shards, then local documents.
        ring_ends: end of each slice in the sequence of each ring shard, in tokens.
        local_ends: end of each slice on the local line, in tokens.
        kept: indices of the ring shards whose keys stay on all ranks of their ring from slice to slice.
        sent_sums: indices of the kept shards whose gradient sums travel to their own ranks with each slice.
        swapped: indices of the kept shards whose keys are in host memory between their uses.
    """

    micro_batch: MicroBatch
    ring_ends: tuple[tuple[int, ...], ...]
    local_ends: tuple[int, ...]
    kept: frozenset[int] = frozenset()
    sent_sums: frozenset[int] = frozenset()
    swapped: frozenset[int] = frozenset()

    @property
    def num_slices(self) -> int:
        return len(self.local_ends)

    def ring_range(self, shard: int, index: int) -> tuple[int, int]:
        """Return the tokens [start, stop) of a ring shard's sequence in a slice, on all ranks of the ring together."""
        return _range(self.ring_ends[shard], index)

    def local_range(self, index: int) -> tuple[int, int]:
        """Return the tokens [start, stop) of the local line in a slice."""
        return _range(self.local_ends, index)

    def slice(self, index: int, rank: int) -> MicroBatch:
        """Return the shards that ``rank`` reads for a slice, in memory order, without empty shards."""
        num_rings = len(self.ring_ends)
        shards = []
        for number, shard in enumerate(self.micro_batch.shards[:num_rings]):
            start, stop = self.ring_range(number, index)
            share = zigzag_ranges(stop - start, len(shard.ring), shard.ring.index(rank))
            shards.append(replace(shard, ranges=tuple((start + a, start + b) for a, b in share)))
        first, last = self.local_range(index)
        documents = self.micro_batch.shards[num_rings:]
        for document, (begin, end) in zip(documents, pairwise(_line(documents)), strict=True):
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                shards.append(Shard(document.seq, ((start - begin, stop - begin),), document.ring))
        return MicroBatch(tuple(shard for shard in shards if shard.ranges), self.micro_batch.offload)


@dataclass(frozen=True, slots=True)
class SliceRule:
    """The rule that divides micro-batches into slices.

    Attributes:
        slicing: k slices of a micro-batch, and which keys are kept; the order of work does not matter.
        cost: cost that is equal in all slices, with ``a``, ``b`` and, for kept keys, ``c``; None: tokens.
        rows_multiple: multiple of tokens in each slice of a rank, if possible: the tensor-parallel size with sequence
            parallelism.
    """

    slicing: Slicing
    cost: CostModel | None = None
    rows_multiple: int = 1

    def __call__(self, micro_batch: MicroBatch, lengths: Sequence[int]) -> DocumentSlices:
        """Return the slices of a micro-batch of one rank. Ranks that share a sequence divide it alike.

        Args:
            micro_batch: the micro-batch.
            lengths: tokens of each sequence of the step.
        """
        shards, slicing = micro_batch.shards, self.slicing
        num_rings = sum(len(shard.ring) > 1 for shard in shards)
        in_rings = {number: lengths[shard.seq] for number, shard in enumerate(shards[:num_rings])}
        kept = frozenset(number for number, length in in_rings.items() if length <= slicing.longest_kept)
        sent = frozenset(number for number in kept if in_rings[number] > slicing.summed_tokens)
        swapped = frozenset(number for number in kept if in_rings[number] > slicing.kept_tokens)
        ring_ends = tuple(
            self._ring_ends(lengths[shard.seq], len(shard.ring), number in kept)
            for number, shard in enumerate(shards[:num_rings])
        )
        ring_tokens = [
            sum(end // len(shard.ring) for end, shard in zip(ends, shards, strict=False))
            for ends in list(zip(*ring_ends, strict=True))[:-1] or [()] * (slicing.num_slices - 1)
        ]
        line = _line(shards[num_rings:])
        return DocumentSlices(micro_batch, ring_ends, self._local_ends(line, ring_tokens), kept, sent, swapped)

    def sequence_slices(self, length: int, width: int) -> tuple[int, ...]:
        """Return the tokens of each slice of a sequence on ``width`` ranks, alone in its micro-batch."""
        ends = self._ring_ends(length, width, length <= self.slicing.longest_kept)
        return tuple(stop - start for start, stop in pairwise((0, *ends)))

    def _ring_ends(self, length: int, width: int, is_kept: bool) -> tuple[int, ...]:
        """Return the ends of the slices of a ring's sequence. Slices of a short sequence may be empty."""
        grain = math.lcm(2, self.rows_multiple) * width
        num_slices = self.slicing.num_slices
        shares = (index / num_slices for index in range(1, num_slices))
        inner = (self._end(length, share, width if is_kept else 1) // grain * grain for share in shares)
        return (*(int(end) for end in inner), length)

    def _end(self, length: int, share: float, width: int = 1) -> float:
        """Return the token at which a share of a sequence's cost ends if ``width`` ranks exchange its keys once."""
        if self.cost is None:
            return length * share
        return float(self.cost.end_of_share(*(np.array(float(number)) for number in (length, share, width))))

    def _local_ends(self, line: Sequence[int], ring_tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the ends of the slices on the local line.

        Args:
            line: start of each document on the line, then the end of the last document.
            ring_tokens: ring tokens of this rank up to the end of each slice except the last.
        """
        costs = [0.0, *accumulate(self._document_cost(end - begin) for begin, end in pairwise(line))]
        ends: list[int] = []
        number = 0
        for index, tokens in enumerate(ring_tokens, 1):
            target = costs[-1] * index / self.slicing.num_slices
            while number + 2 < len(costs) and costs[number + 1] <= target:
                number += 1
            end = self._end_in_document(line, costs, number, target) if costs[-1] else 0.0
            rows = round((end + tokens) / self.rows_multiple) * self.rows_multiple
            ends.append(min(max(rows - tokens, ends[-1] if ends else 0), line[-1]))
        return (*ends, line[-1])

    def _document_cost(self, length: int) -> float:
        return float(length) if self.cost is None else self.cost.a * self.cost.squares(length) + self.cost.b * length

    def _end_in_document(self, line: Sequence[int], costs: Sequence[float], number: int, target: float) -> float:
        """Return the token of document ``number`` up to which the line costs ``target``, counted on the line."""
        share = (target - costs[number]) / (costs[number + 1] - costs[number])
        length = line[number + 1] - line[number]
        return line[number] + self._end(length, share)


def affordable_tokens(
    num_stages: int, slicing: Slicing, tokens_per_rank: int, layer_bytes: float, key_bytes: float
) -> int:
    """Return the longest sequence whose keys a rank can keep without needing more memory than 1F1B.

    On its first stage, 1F1B holds the activations of p micro-batches of C tokens. Seq1F1B holds the activations of
    ``p - 1 + k`` slices (Sun et al. 2024, section 3.2), p - 1 more slices in the eager order, and the sums of the key
    gradients of one micro-batch. The bytes that it frees are used for the keys of other ranks (``kept_bytes``).

    Args:
        num_stages: p, the number of stages.
        slicing: k slices of a micro-batch.
        tokens_per_rank: C, largest number of tokens of a micro-batch.
        layer_bytes: bytes of activations per token and layer, keys and values included.
        key_bytes: bytes of keys and values per token and layer.
    """
    num_slices = slicing.num_slices
    freed = (num_stages - most_slices(num_stages, slicing) / num_slices) * tokens_per_rank * layer_bytes
    freed -= _sum_bytes(num_slices, tokens_per_rank, key_bytes)
    return max(0, int(freed / kept_bytes(num_stages, slicing, 1, key_bytes)))


def kept_bytes(num_stages: int, slicing: Slicing, num_tokens: int, key_bytes: float, stage: int = 0) -> float:
    """Return the peak bytes on a stage if each micro-batch keeps the keys of ``num_tokens`` tokens of other ranks.

    Each slice in flight has its part of these keys, and the micro-batch in its backward pass has the sums of their
    gradients. ``key_bytes``: bytes of keys and values per token in the counted layers.
    """
    num_slices = slicing.num_slices
    keys = most_slices(num_stages, slicing, stage) / num_slices * num_tokens * key_bytes
    return keys + _sum_bytes(num_slices, num_tokens, key_bytes)


def _sum_bytes(num_slices: int, num_tokens: int, key_bytes: float) -> float:
    """Return the bytes of the float32 gradient sums of half-precision keys, in all slices except the last."""
    return 2.0 * (num_slices - 1) / num_slices * num_tokens * key_bytes


def _range(ends: Sequence[int], index: int) -> tuple[int, int]:
    return (ends[index - 1] if index else 0), ends[index]


def _line(documents: Sequence[Shard]) -> tuple[int, ...]:
    """Return the start of each local document on their line, then the end of the last document."""
    return (0, *accumulate(document.num_tokens for document in documents))
