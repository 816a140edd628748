"""Validators of slices: they accept valid slices and refuse every kind of damage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.schedule.check_slices import check_document_slices, check_slices
from bytescale_ext.plan.schedule.document_slices import DocumentSlices, SliceRule
from bytescale_ext.plan.schedule.slices import PARTITIONS, slice_lengths
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.sizes import Slicing

COST = CostModel(0.1, 1.0)
SLICING = Slicing(3, kept_tokens=150)
LENGTHS = (301, 130, 40, 30)
RING = (4, 5, 6)
Cuts = dict[int, list[DocumentSlices]]


def cuts_of(slicing: Slicing = SLICING, multiple: int = 1, cost: CostModel | None = COST) -> Cuts:
    """Return a ring of three ranks with two sequences, and two documents on its first rank."""
    rule = SliceRule(slicing, cost, multiple)
    rings = {rank: tuple(Shard(seq, zigzag_ranges(LENGTHS[seq], 3, n), RING) for seq in (0, 1))
             for n, rank in enumerate(RING)}  # fmt: skip
    documents = tuple(Shard(seq, ((0, LENGTHS[seq]),), (4,)) for seq in (2, 3))
    held = {rank: MicroBatch((*shards, *(documents if rank == 4 else ()))) for rank, shards in rings.items()}
    return {rank: [rule(micro_batch, LENGTHS)] for rank, micro_batch in held.items()}


class Damaged(DocumentSlices):
    """Slices with a rank that reads wrong tokens."""

    def slice(self, index: int, rank: int) -> MicroBatch:
        return damage(index, super().slice(index, rank))


def damage(index: int, piece: MicroBatch) -> MicroBatch:
    """Ranges to read, set by the tests."""
    raise NotImplementedError


def damaged(cut: DocumentSlices) -> DocumentSlices:
    return Damaged(cut.micro_batch, cut.ring_ends, cut.local_ends, cut.kept, cut.sent_sums, cut.swapped)


@pytest.mark.parametrize("multiple", [1, 2, 4])
@pytest.mark.parametrize("cost", [COST, None])
@pytest.mark.parametrize(
    "slicing",
    [Slicing(), Slicing(2), SLICING, Slicing(7, 10**6, summed_tokens=150), replace(SLICING, swapped_tokens=999)],
)
def test_cuts_are_accepted(slicing: Slicing, multiple: int, cost: CostModel | None) -> None:
    cuts = cuts_of(slicing, multiple, cost)
    check_document_slices(cuts, LENGTHS, slicing, multiple)
    for rank, row in cuts.items():  # a rank checks its own micro-batches separately
        check_document_slices({rank: row}, LENGTHS, slicing, multiple)


@pytest.mark.slow
def test_random_cuts_are_accepted() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        width, slicing = int(random.integers(2, 6)), Slicing(int(random.integers(1, 7)), int(random.integers(0, 9000)))
        lengths = random.integers(width, 9000, size=2).tolist() + random.integers(1, 700, size=4).tolist()
        multiple = int(random.choice([1, 2, 8]))
        rule, ring = SliceRule(slicing, COST, multiple), tuple(range(width))
        documents = tuple(Shard(seq, ((0, lengths[seq]),), (0,)) for seq in range(2, 6))
        cuts = {}
        for rank in ring:
            shards = tuple(Shard(seq, zigzag_ranges(lengths[seq], width, rank), ring) for seq in (0, 1))
            cuts[rank] = [rule(MicroBatch(shards + (() if rank else documents)), lengths), rule(MicroBatch(()), ())]
        check_document_slices(cuts, lengths, slicing, multiple)


def with_ends(
    number: int, change: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> Callable[[DocumentSlices], DocumentSlices]:
    """Change the ends of one ring's sequence."""
    return lambda cut: replace(
        cut, ring_ends=tuple(change(ends) if n == number else ends for n, ends in enumerate(cut.ring_ends))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_ends(0, lambda e: (e[0] + 1, *e[1:])), r"inner ends .* of sequence 0 are not multiples of 6"),
        (with_ends(0, lambda e: (*e[:-1], e[-1] - 1)), "of sequence 0 do not divide its 301 tokens into 3 slices"),
        (with_ends(1, lambda e: (e[1], e[0], e[2])), "of sequence 1 do not divide its 130 tokens into 3 slices"),
        (with_ends(1, lambda e: e[1:]), "of sequence 1 do not divide its 130 tokens into 3 slices"),
        (with_ends(1, lambda e: (-6, *e[1:])), "of sequence 1 do not divide its 130 tokens into 3 slices"),
        (with_ends(0, lambda e: (e[0] - 6, *e[1:])), r"ranks \[4, 5, 6\] slice sequence 0 differently"),
        (lambda cut: replace(cut, local_ends=(0, 0, 69)), "the local line do not divide its 70 tokens into 3 slices"),
        (lambda cut: replace(cut, local_ends=(40, 30, 70)), "the local line do not divide its 70 tokens into 3 slices"),
        (lambda cut: replace(cut, kept=frozenset()), r"are kept for shards \[\], but the lengths require shards \[1\]"),
        (lambda cut: replace(cut, sent_sums=frozenset((1,))), r"gradient sums travel for shards \[1\]"),
        (lambda cut: replace(cut, kept=frozenset((0, 1))), r"keys are kept for shards \[0, 1\]"),
        (lambda cut: replace(cut, swapped=frozenset((1,))), r"keys are swapped to host memory for shards \[1\]"),
        (lambda cut: replace(cut, ring_ends=cut.ring_ends[:1]), "ends for 1 rings, which must be the first 4 shards"),
        (lambda cut: replace(cut, micro_batch=MicroBatch(cut.micro_batch.shards[::-1])), "ends for 2 rings"),
    ],
)  # fmt: skip
def test_damaged_ends_are_refused(change: Callable[[DocumentSlices], DocumentSlices], message: str) -> None:
    cuts = cuts_of()
    with pytest.raises(PlanError, match=message):
        check_document_slices(cuts | {4: [change(cuts[4][0])]}, LENGTHS, SLICING)


def test_keys_that_are_not_swapped_as_planned_are_refused() -> None:
    """The keys of sequence 0, of 301 tokens, are in host memory.

    The keys of sequence 1, of 130 tokens, are on the device.
    """
    slicing = replace(SLICING, swapped_tokens=301)
    cuts = cuts_of(slicing)
    assert cuts[4][0].swapped == {0}
    assert cuts[4][0].kept == {0, 1}
    for swapped in ((), (1,), (0, 1)):
        bad = replace(cuts[4][0], swapped=frozenset(swapped))
        with pytest.raises(PlanError, match=r"the lengths require shards \[0\]"):
            check_document_slices(cuts | {4: [bad]}, LENGTHS, slicing)
    with pytest.raises(PlanError, match=r"keys are kept for shards \[1\], but the lengths require shards \[0, 1\]"):
        check_document_slices(cuts | {4: [replace(cuts[4][0], kept=frozenset((1,)))]}, LENGTHS, slicing)


def other_ranges(seq: int, change: Callable[[tuple], tuple], at: int = 0) -> Callable[[int, MicroBatch], MicroBatch]:
    """Change the ranges that slice ``at`` reads of one sequence."""

    def damage(index: int, piece: MicroBatch) -> MicroBatch:
        shards = (
            replace(shard, ranges=change(shard.ranges)) if shard.seq == seq and index == at else shard
            for shard in piece.shards
        )
        return replace(piece, shards=tuple(shard for shard in shards if shard.ranges))

    return damage


def moved(ranges: tuple[tuple[int, int], ...], by: int = 1) -> tuple[tuple[int, int], ...]:
    return tuple((start + by, stop + by) for start, stop in ranges)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (other_ranges(0, lambda ranges: ranges[:1]), "slice 0 of sequence 0: rank 4 reads"),
        (other_ranges(0, moved), "slice 0 of sequence 0: rank 4 reads"),
        (other_ranges(0, lambda ranges: ranges[::-1]), "slice 0 of sequence 0: rank 4 reads"),
        (other_ranges(1, lambda ranges: (), 1), r"slice 1 of sequence 1: rank 4 reads \(\)"),
        (other_ranges(0, lambda ranges: (), 2), "slice 2 of sequence 0: rank 4 reads 0 of"),
        (other_ranges(0, moved, 2), "slice 2 of sequence 0: its ranks read"),
        (other_ranges(2, lambda ranges: ()), "slices up to 0 read 0 tokens of local documents"),
        (other_ranges(2, moved), "local documents are read as"),
        (other_ranges(3, lambda ranges: moved(ranges, -2), 2), "local documents are read as"),
        (lambda index, piece: replace(piece, offload=0.5 * (index == 1)), "the offload share of slices differs"),
        (lambda index, piece: replace(piece, shards=piece.shards[:2] + piece.shards[:1:-1]), "documents are read"),
    ],
)  # fmt: skip
def test_other_tokens_are_refused(
    damage: Callable[[int, MicroBatch], MicroBatch], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "damage", damage)
    cuts = cuts_of()
    with pytest.raises(PlanError, match=message):
        check_document_slices(cuts | {4: [damaged(cuts[4][0])]}, LENGTHS, SLICING)


def test_swapped_slices_are_refused() -> None:
    class Swapped(DocumentSlices):
        def slice(self, index: int, rank: int) -> MicroBatch:
            return super().slice((1, 0, 2)[index], rank)

    cuts = {
        rank: [Swapped(c.micro_batch, c.ring_ends, c.local_ends, c.kept, c.sent_sums)]
        for rank, (c,) in cuts_of().items()
    }
    with pytest.raises(PlanError, match="slice 0 of sequence 0"):
        check_document_slices(cuts, LENGTHS, SLICING)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_slices_of_samples_are_accepted(partition: str) -> None:
    for num_tokens, num_slices, multiple in ((17, 3, 1), (64, 8, 8), (4096, 5, 2)):
        lengths = slice_lengths(num_tokens, num_slices, partition, COST, multiple)
        check_slices(lengths, num_tokens, num_slices, multiple)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((8, 4), "2 slices, not 3: 8,4"),
        ((8, 2, 2, 4), "4 slices, not 3"),
        ((8, 4, 5), "slice 2 has 5 tokens, not a positive multiple of 2"),
        ((12, 0, 4), "slice 1 has 0 tokens"),
        ((8, 4, 2), "14 tokens in total, not 16"),
        ((20, -8, 4), "slice 1 has -8 tokens"),
    ],
)
def test_damaged_slices_of_samples_are_refused(lengths: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_slices(lengths, 16, 3, 2)
