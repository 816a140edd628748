"""Only labels that are answers have a loss: in ring shards, packs, slices and padding."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.data.loading.step import LoaderSettings
from bytescale_ext.data.samples.answers import WeightSource, with_means, with_weights
from bytescale_ext.data.samples.packed import pack_micro_batch
from bytescale_ext.data.samples.units import units_of
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.sizes import Slicing
from tests.data.sources import MemorySource

LENGTHS = (16, 3, 1)


class MarkedSource(MemorySource):
    """Documents in memory; every third token of each document is an answer."""

    def weights(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        """Return 1 for answers: float32 [stop - start]."""
        places = np.arange(start, stop)
        return ((places % 3 == 0) & (places < self.length(sample_id))).astype(np.float32)


def expected(shards: tuple[Shard, ...]) -> list[float]:
    """Return the loss mask of the rows by definition."""
    rows = [(shard.seq, p) for shard in shards for start, stop in shard.ranges for p in range(start, stop)]
    return [float((p + 1) % 3 == 0 and p + 1 < LENGTHS[seq]) for seq, p in rows]


SHARDS = {
    "ring": (Shard(0, zigzag_ranges(16, 2, 1), (0, 1)),),
    "pack": (Shard(0, ((0, 16),), (0,)), Shard(1, ((0, 3),), (0,)), Shard(2, ((0, 1),), (0,))),
    "no answer": (Shard(1, ((0, 2),), (0,)), Shard(2, ((0, 1),), (0,))),
}


@pytest.mark.parametrize("name", SHARDS)
def test_the_loss_mask_of_shards(name: str) -> None:
    shards, source = SHARDS[name], MarkedSource(LENGTHS)
    packed = pack_micro_batch(MicroBatch(shards), source, [0, 1, 2], 4, LENGTHS)
    found = with_weights(packed, source, [0, 1, 2])
    wanted = expected(shards)
    assert found.loss_mask.tolist() == [*wanted, *[0.0] * (packed.num_rows - len(wanted))]
    assert packed.loss_mask.sum() > found.loss_mask.sum(), "the micro-batch itself has changed"
    assert found.tokens is packed.tokens


def test_every_answer_is_counted_once_over_the_ranks_of_a_ring() -> None:
    source, total = MarkedSource(LENGTHS), 0.0
    for member in range(3):
        shard = Shard(0, zigzag_ranges(16, 3, member), (0, 1, 2))
        packed = pack_micro_batch(MicroBatch((shard,)), source, [0], 1, LENGTHS)
        total += float(with_weights(packed, source, [0]).loss_mask.sum())
    assert total == 5  # tokens 3, 6, 9, 12 and 15; token 0 is not a label


def document_mean(losses: np.ndarray, seq: int) -> float:
    """Return the mean loss of the answers of a document by definition; ``losses``: [tokens], of the labels."""
    marks = np.array([(p + 1) % 3 == 0 and p + 1 < LENGTHS[seq] for p in range(LENGTHS[seq])])
    return float(losses[marks].mean()) if marks.any() else 0.0


@pytest.mark.parametrize("num_slices", [1, 3])
def test_a_mean_over_documents_in_rings_packs_and_slices(num_slices: int) -> None:
    source, random = MarkedSource(LENGTHS), np.random.default_rng(2)
    losses = [random.random(length) for length in LENGTHS]
    packs = [[Shard(0, zigzag_ranges(16, 2, member), (0, 1)), *others]
             for member, others in enumerate([[Shard(1, ((0, 3),), (0,))], [Shard(2, ((0, 1),), (1,))]])]  # fmt: skip
    total = count = 0.0
    rule = None if num_slices == 1 else SliceRule(Slicing(num_slices))
    for rank, shards in enumerate(packs):
        settings = LoaderSettings(rank, 1, rows_multiple=2, normalization="documents")
        units = units_of([MicroBatch(tuple(shards))], LENGTHS, rank, 2, rule)
        for packed in settings.read(units, source, [0, 1, 2], LENGTHS):
            rows = [(s.seq, p) for s in packed.micro_batch.shards for a, b in s.ranges for p in range(a, b)]
            total += sum(losses[seq][p] * float(packed.loss_mask[row]) for row, (seq, p) in enumerate(rows))
            count += float(packed.num_labels)
    has_answer = [length > 3 for length in LENGTHS]
    assert count == sum(has_answer) == 1
    assert total == pytest.approx(sum(document_mean(losses[seq], seq) for seq in range(3)))


def test_documents_without_weights_count_all_labels() -> None:
    packed = pack_micro_batch(MicroBatch(SHARDS["pack"]), MemorySource(LENGTHS), [0, 1, 2], 4, LENGTHS)
    (found,) = with_means([packed], MemorySource(LENGTHS), [0, 1, 2], LENGTHS, lambda one: (one,))
    assert found.loss_mask[:20].tolist() == pytest.approx([1 / 15] * 15 + [0] + [1 / 2] * 2 + [0] * 2)
    assert float(found.num_labels) == 2
    assert int(packed.num_labels) == 17


def test_later_tokens_of_a_document_weigh_as_its_labels() -> None:
    """Each depth with a token counts as much as the next token: the weights of a document have the sum 1."""
    settings = LoaderSettings(0, 1, future_tokens=2, weighs_future=True, normalization="documents")
    (packed,) = settings.read(
        units_of([MicroBatch(SHARDS["pack"])], LENGTHS, 0, 1, None), MemorySource(LENGTHS), [0, 1, 2], LENGTHS
    )
    weights, row = packed.future_weights, 0
    assert weights is not None
    for shard in SHARDS["pack"]:
        rows = slice(row, row + shard.num_tokens)
        row = rows.stop
        num_labels = int((packed.loss_mask[rows] > 0).sum())
        assert weights[rows].sum(0).tolist() == pytest.approx([float(num_labels > depth) for depth in (1, 2)])


def test_the_loader_asks_sources_that_know() -> None:
    micro_batch = MicroBatch(SHARDS["pack"])
    assert isinstance(MarkedSource(LENGTHS), WeightSource)
    assert not isinstance(MemorySource(LENGTHS), WeightSource)
    masks = {}
    for rule in (None, SliceRule(Slicing(3))):
        units = units_of([micro_batch, MicroBatch(())], LENGTHS, 0, 2, rule)
        for source in (MarkedSource(LENGTHS), MemorySource(LENGTHS)):
            read = LoaderSettings(0, 1, rows_multiple=2).read(units, source, [0, 1, 2], LENGTHS)
            masks[type(source), rule] = sum(float(one.loss_mask.sum()) for one in read)
            rows = [(one.positions[one.loss_mask > 0] + 1) % 3 for one in read]
            assert type(source) is MemorySource or all((row == 0).all() for row in rows)
    assert masks == {(MarkedSource, None): 5, (MemorySource, None): 17, **{
        (MarkedSource, SliceRule(Slicing(3))): 5, (MemorySource, SliceRule(Slicing(3))): 17,
    }}  # fmt: skip
