"""Layouts of slices by brute force: all ranks and slices together compute every causal pair of tokens exactly once.

The test computes no tensors. Each rank's buffer is a list of tokens, filled according to ``layouts/slices.py``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from bytescale_ext.attention.layouts.blocks import PlacedBlock
from bytescale_ext.attention.layouts.layout import RingPass
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.layouts.slices import SliceLayout, sample_layouts, slice_layouts
from bytescale_ext.plan.schedule.document_slices import DocumentSlices
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from tests.sample import seeds

Token = tuple[int, int]  # sequence, position
Pairs = Counter[tuple[Token, Token]]


def rows_of(rows: Rows) -> list[int]:
    return [row for start, stop in rows.intervals for row in range(start, stop)]


def pick(tokens: Sequence[Token | None], rows: Rows) -> list[Token]:
    """Return the tokens in these rows, and fail for a row that was not written."""
    found = [tokens[row] for row in rows_of(rows)]
    assert None not in found
    return found  # type: ignore[return-value]


def pairs_of(block: PlacedBlock, queries: Sequence[Token], keys: Sequence[Token]) -> Pairs:
    """Return the (query, key) pairs of a block. Queries and keys are in the order of its rows."""
    pairs: Pairs = Counter()
    for q_rows, k_rows in zip(pairwise(block.cu_q.offsets), pairwise(block.cu_k.offsets), strict=True):
        document = keys[slice(*k_rows)]
        for row, query in enumerate(queries[slice(*q_rows)]):
            pairs.update((query, key) for key in (document[: row + 1] if block.causal else document))
    return pairs


def triangles(lengths: Sequence[int]) -> Pairs:
    return Counter(
        ((seq, query), (seq, key))
        for seq, length in enumerate(lengths)
        for query in range(length)
        for key in range(query + 1)
    )


class Rank:
    """A rank with its layouts, the tokens of each slice, and the tokens of its keys so far."""

    def __init__(self, cut: DocumentSlices, rank: int, num_padding: int) -> None:
        pieces = [cut.slice(index, rank) for index in range(cut.num_slices)]
        self.tokens = [
            [
                (shard.seq, token)
                for shard in piece.shards
                for start, stop in shard.ranges
                for token in range(start, stop)
            ]
            for piece in pieces
        ]
        self.layouts = slice_layouts(cut, rank, [len(tokens) + num_padding for tokens in self.tokens])
        self.buffer: list[Token | None] = [None] * sum(rows.num_rows for rows in self.layouts[-1].held.places)

    def write(self, index: int, rows: Rows, tokens: Sequence[Token]) -> None:
        """Write rows of the keys of slice ``index``, and fail if a row is written twice."""
        held = set(rows_of(self.layouts[index].held.places[-1]))
        for row, token in zip(rows_of(rows), tokens, strict=True):
            assert row in held, f"slice {index} does not hold {row=}"
            assert self.buffer[row] is None, f"{row=} holds {self.buffer[row]}, not {token}"
            self.buffer[row] = token


def arriving(ranks: Sequence[Rank], member: RingPass, index: int, source: int) -> tuple[RingPass, list[Token]]:
    """Return the pass of another member of the ring in slice ``index``, and the keys that it sends."""
    other = ranks[member.ring[source]]
    (found,) = (
        one for one in other.layouts[index].attention.passes if (one.ring, one.seqs) == (member.ring, member.seqs)
    )
    return found, pick(other.buffer, found.sent_keys)


def ring_pairs(ranks: Sequence[Rank], rank: Rank, member: RingPass, index: int) -> Pairs:
    """Return the pairs that a rank computes in one pass of slice ``index``, with keys from each member in turn."""
    mine = pick(rank.tokens[index], member.in_micro_batch)
    pairs: Pairs = Counter()
    for step in range(member.width):
        source = member.source(step)
        _, keys = arriving(ranks, member, index, source)
        assert len(keys) == member.travelling(source)
        if member.kept is not None:
            if step:
                rank.write(index, member.kept.own[source], keys)
            keys = pick(rank.buffer, member.kept.whole[source])
        assert len(keys) == member.rows[source]
        for block in member.at(step):
            assert block.source == source
            pairs += pairs_of(block, pick(mine, block.queries), pick(keys, block.keys))
    return pairs


def local_pairs(layout: SliceLayout, tokens: Sequence[Token], buffer: Sequence[Token | None]) -> Pairs:
    pairs: Pairs = Counter()
    for block in layout.attention.local_blocks:
        pairs += pairs_of(block, pick(tokens, block.queries), pick(buffer, block.keys))
    return pairs


def cuts_of(source: random.Random) -> tuple[list[int], list[DocumentSlices]]:
    """Return the lengths of sequences, and the slices of a micro-batch of each rank. Rings divide them equally."""
    num_ranks, num_slices = source.randint(1, 4), source.randint(1, 4)
    rings: list[tuple[int, ...]] = []
    for _ in range(source.randint(1, 6)):
        first = source.randrange(num_ranks)
        ring = tuple(range(first, source.randint(first, num_ranks - 1) + 1))
        rings.append(source.choice(rings) if rings and source.random() < 0.4 else ring)
    lengths = [source.randint(len(ring), 40) for ring in rings]
    ends = []
    for ring, length in zip(rings, lengths, strict=True):
        grain = 2 * len(ring)
        inner = sorted(source.randint(0, length) // grain * grain for _ in range(num_slices - 1))
        ends.append((*inner, length))
    kept = {seq for seq in range(len(rings)) if source.random() < 0.5}
    cuts = []
    for rank in range(num_ranks):
        shared = [seq for seq, ring in enumerate(rings) if rank in ring and len(ring) > 1]
        local = [seq for seq, ring in enumerate(rings) if ring == (rank,)]
        shards = [
            Shard(seq, zigzag_ranges(lengths[seq], len(rings[seq]), rings[seq].index(rank)), rings[seq])
            for seq in shared
        ]
        shards += [Shard(seq, ((0, lengths[seq]),), (rank,)) for seq in local]
        line = sum(lengths[seq] for seq in local)
        local_ends = (*sorted(source.randint(0, line) for _ in range(num_slices - 1)), line)
        numbers = frozenset(number for number, seq in enumerate(shared) if seq in kept)
        cuts.append(DocumentSlices(MicroBatch(tuple(shards)), tuple(ends[seq] for seq in shared), local_ends, numbers))
    return lengths, cuts


@pytest.mark.parametrize("seed", seeds(25))
def test_slices_of_all_ranks_compute_every_pair_once(seed: int) -> None:
    lengths, cuts = cuts_of(random.Random(seed))
    ranks = [Rank(cut, rank, seed % 3) for rank, cut in enumerate(cuts)]
    total: Pairs = Counter()
    for index in range(cuts[0].num_slices):
        for rank in ranks:
            rank.write(index, rank.layouts[index].own, rank.tokens[index])
            assert rank.layouts[index].num_rows == len(rank.tokens[index]) + seed % 3
            assert rank.layouts[index].attention.num_tokens == len(rank.tokens[index])
        for rank in ranks:
            layout = rank.layouts[index]
            total += local_pairs(layout, rank.tokens[index], rank.buffer)
            for member in layout.attention.passes:
                total += ring_pairs(ranks, rank, member, index)
    assert total == triangles(lengths)
    assert all(None not in rank.buffer for rank in ranks), "slices hold rows that nothing is written to"


@pytest.mark.parametrize("seed", seeds(25))
def test_ranks_run_the_passes_of_a_slice_in_one_order(seed: int) -> None:
    """Two ranks that share several passes run them in the same order, so no rank waits forever."""
    _, cuts = cuts_of(random.Random(seed))
    ranks = [Rank(cut, rank, 0) for rank, cut in enumerate(cuts)]
    for index in range(cuts[0].num_slices):
        passes = [[(one.ring, one.seqs) for one in rank.layouts[index].attention.passes] for rank in ranks]
        for first in range(len(ranks)):
            for second in range(first):
                of_first = [one for one in passes[first] if second in one[0]]
                assert of_first == [one for one in passes[second] if first in one[0]]


@pytest.mark.parametrize("lengths", [(5,), (3, 2), (1, 4, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_samples_side_by_side_compute_every_pair_once(lengths: tuple[int, ...], batch: int) -> None:
    buffer: list[Token | None] = [None] * (sum(lengths) * batch)
    total: Pairs = Counter()
    start = 0
    for layout, length in zip(sample_layouts(lengths, batch), lengths, strict=True):
        tokens = [(sample, token) for sample in range(batch) for token in range(start, start + length)]
        for row, token in zip(rows_of(layout.own), tokens, strict=True):
            assert buffer[row] is None
            buffer[row] = token
        total += local_pairs(layout, tokens, buffer)
        start += length
    assert total == triangles([sum(lengths)] * batch)
