"""Cut micro-batches of documents and ring shards into slices that a pipeline runs one after another.

``slices.py`` cuts samples of one length. Here each sequence of a ring is cut by itself into parts of equal cost. The
local documents of a rank are cut together, laid end to end on a line. Slice j of a micro-batch holds part j of each::

    ring shards   | A0          | A1       | A2      |       A0: tokens [0, end 0) of A, shared out over A's ring
                  | B0          | B1       | B2      |
    local line    | doc  doc  do|c  doc  do|c  doc   |       a document may continue in the next slice

The ends in a ring's sequence follow from its length and the width of the ring, so all ranks cut it alike. All ends but
the last are multiples of 2D tokens for D ranks. So each rank gets an equal front and back part of every slice but the
last, and holds as many tokens of the sequence as without slices.

A slice attends to all earlier slices. Either their keys travel round the ring again with each slice and each rank
stores only its own. Or each rank keeps all keys that it has received, and only the keys of the new slice travel: that
moves ``2 / (k + 1)`` of the bytes and stores D times the keys, so it is done for sequences up to a length. Below
``affordable_tokens`` slices free more memory than kept keys take. The gradients of kept keys are summed on each rank
until their slice runs backward, or travel home with each slice: then each rank stores a third of the bytes. Keys that
the device has no room for may be kept in host memory.
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
    """Where one rank's micro-batch is cut.

    Attributes:
        micro_batch: ring shards first, then local documents.
        ring_ends: for each ring shard, the token of its sequence at which each slice ends.
        local_ends: the token of the local line at which each slice ends.
        kept: numbers of the ring shards whose keys stay on all ranks of their ring from slice to slice.
        sent_sums: numbers of the kept shards whose gradient sums travel home with each slice.
        swapped: numbers of the kept shards whose keys are in host memory between their uses.
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
        """Return the tokens [start, stop) of a ring shard's sequence that are in a slice, on all ranks of the ring."""
        return _range(self.ring_ends[shard], index)

    def local_range(self, index: int) -> tuple[int, int]:
        """Return the tokens [start, stop) of the local line that are in a slice."""
        return _range(self.local_ends, index)

    def slice(self, index: int, rank: int) -> MicroBatch:
        """Return the token ranges that ``rank`` reads for a slice, in memory order, without empty shards."""
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
    """How micro-batches are cut.

    Attributes:
        slicing: k slices of a micro-batch, and which keys are kept; where slices end does not depend on their order.
        cost: slices are equal in this cost: ``a``, ``b`` and, where keys are kept, ``c``. None: in tokens.
        rows_multiple: local documents are cut so that a slice's tokens are a multiple of this where possible: the
            tensor-parallel size under sequence parallelism.
    """

    slicing: Slicing
    cost: CostModel | None = None
    rows_multiple: int = 1

    def __call__(self, micro_batch: MicroBatch, lengths: Sequence[int]) -> DocumentSlices:
        """Cut a micro-batch. Pure; ranks that share a sequence cut it alike.

        Args:
            micro_batch: of one rank.
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
        before = [
            sum(end // len(shard.ring) for end, shard in zip(ends, shards, strict=False))
            for ends in list(zip(*ring_ends, strict=True))[:-1] or [()] * (slicing.num_slices - 1)
        ]
        line = _line(shards[num_rings:])
        return DocumentSlices(micro_batch, ring_ends, self._local_ends(line, before), kept, sent, swapped)

    def sequence_slices(self, length: int, width: int) -> tuple[int, ...]:
        """Return the tokens of each slice of a sequence that has its micro-batch to itself, on ``width`` ranks."""
        ends = self._ring_ends(length, width, length <= self.slicing.longest_kept)
        return tuple(stop - start for start, stop in pairwise((0, *ends)))

    def _ring_ends(self, length: int, width: int, is_kept: bool) -> tuple[int, ...]:
        """Return the ends of the slices of a ring's sequence; slices of a short sequence may be empty."""
        grain = math.lcm(2, self.rows_multiple) * width
        num_slices = self.slicing.num_slices
        shares = (index / num_slices for index in range(1, num_slices))
        inner = (self._end(length, share, width if is_kept else 1) // grain * grain for share in shares)
        return (*(int(end) for end in inner), length)

    def _end(self, length: int, share: float, width: int = 1) -> float:
        """Return where a share of a sequence's cost ends; ``width`` ranks exchange its keys once."""
        if self.cost is None:
            return length * share
        return float(self.cost.end_of_share(*(np.array(float(one)) for one in (length, share, width))))

    def _local_ends(self, line: Sequence[int], ring_tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the ends of the slices on the local line.

        Args:
            line: where each document begins, and where the last one ends.
            ring_tokens: this rank's tokens of rings up to the end of each slice but the last.
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
        """Return the token of the line up to which it costs ``target``; it lies in document ``number``."""
        share = (target - costs[number]) / (costs[number + 1] - costs[number])
        length = line[number + 1] - line[number]
        return line[number] + self._end(length, share)


def affordable_tokens(
    num_stages: int, slicing: Slicing, tokens_per_rank: int, layer_bytes: float, key_bytes: float
) -> int:
    """Return the longest sequence whose keys a rank can keep without holding more than under 1F1B.

    1F1B holds the activations of p micro-batches of C tokens on its first stage. Seq1F1B holds those of
    ``n = p - 1 + k`` slices (Sun et al. 2024, section 3.2), and p - 1 slices more if stages run ahead; and the sums of
    the key gradients of one micro-batch. The bytes that this frees are for the keys of other ranks, ``kept_bytes``.

    Args:
        num_stages: p.
        slicing: k slices of a micro-batch.
        tokens_per_rank: C.
        layer_bytes: activations that a token keeps in a layer, its key and value included.
        key_bytes: key and value of a token in a layer.
    """
    num_slices = slicing.num_slices
    freed = (num_stages - most_slices(num_stages, slicing) / num_slices) * tokens_per_rank * layer_bytes
    freed -= _sum_bytes(num_slices, tokens_per_rank, key_bytes)
    return max(0, int(freed / kept_bytes(num_stages, slicing, 1, key_bytes)))


def kept_bytes(num_stages: int, slicing: Slicing, num_tokens: int, key_bytes: float, stage: int = 0) -> float:
    """Return the most bytes on a stage when each micro-batch keeps the keys of ``num_tokens`` tokens of other ranks.

    Each of the n slices in flight (see ``affordable_tokens``) has its part of them, and the micro-batch in its backward
    pass has the sums of their gradients. ``key_bytes``: of a token's key and value, in the layers that are counted.
    """
    num_slices = slicing.num_slices
    return most_slices(num_stages, slicing, stage) / num_slices * num_tokens * key_bytes + _sum_bytes(
        num_slices, num_tokens, key_bytes
    )


def _sum_bytes(num_slices: int, num_tokens: int, key_bytes: float) -> float:
    """Return the bytes of the sums of key gradients of all slices but the last: float32, of keys in half precision."""
    return 2.0 * (num_slices - 1) / num_slices * num_tokens * key_bytes


def _range(ends: Sequence[int], index: int) -> tuple[int, int]:
    return (ends[index - 1] if index else 0), ends[index]


def _line(documents: Sequence[Shard]) -> tuple[int, ...]:
    """Return where local documents begin and end on their line."""
    return (0, *accumulate(document.num_tokens for document in documents))
