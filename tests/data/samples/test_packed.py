"""Rows of one rank: tokens, labels, masks and positions."""

import numpy as np
import pytest
import torch

from bytescale_ext.data.samples.packed import lengths_of, pack_micro_batch
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from tests.data.sources import MemorySource


def _local(seq: int, length: int) -> Shard:
    return Shard(seq, ((0, length),), (0,))


def test_rows_of_a_ring_shard_and_a_local_document() -> None:
    source = MemorySource([8, 3])  # tokens 1..8 and 9..11
    micro_batch = MicroBatch((Shard(0, zigzag_ranges(8, 2, 0), (0, 1)), _local(1, 3)))
    packed = pack_micro_batch(micro_batch, source, [0, 1], rows_multiple=4, lengths=[8, 3])
    assert packed.tokens.tolist() == [1, 2, 7, 8, 9, 10, 11, 0]
    assert packed.labels.tolist() == [2, 3, 8, 0, 10, 11, 0, 0]
    assert packed.loss_mask.tolist() == [1, 1, 1, 0, 1, 1, 0, 0]
    assert packed.positions.tolist() == [0, 1, 6, 7, 0, 1, 2, 0]
    assert packed.num_rows == 8
    assert packed.micro_batch is micro_batch
    assert packed.documents == ("memory: document 0 tokens 0-8", "memory: document 1 tokens 0-3")
    assert packed.tokens.dtype == packed.labels.dtype == packed.positions.dtype == torch.int64
    assert packed.loss_mask.dtype == torch.float32


def test_the_last_token_of_a_piece_is_labelled_with_the_next_piece() -> None:
    source = MemorySource([7], seq_length=3)  # pieces 1..3, 4..6, 7
    packed = pack_micro_batch(MicroBatch((_local(0, 3), _local(1, 3), _local(2, 1))), source, [0, 1, 2], 1, [3, 3, 1])
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert packed.labels.tolist() == [2, 3, 4, 5, 6, 7, 0]
    assert packed.loss_mask.tolist() == [1, 1, 1, 1, 1, 1, 0]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_only_the_ranges_and_one_label_token_are_read() -> None:
    source = MemorySource([1000])
    ranges = zigzag_ranges(1000, 4, 2)
    pack_micro_batch(MicroBatch((Shard(0, ranges, (0, 1, 2, 3)),)), source, [0], 1, [1000])
    assert source.reads == [(0, start, stop + 1) for start, stop in ranges]


@pytest.mark.parametrize(("multiple", "rows"), [(1, 5), (2, 6), (5, 5), (8, 8), (64, 64)])
def test_rows_are_padded_at_the_end(multiple: int, rows: int) -> None:
    packed = pack_micro_batch(MicroBatch((_local(0, 5),)), MemorySource([5]), [0], multiple, [5])
    assert packed.num_rows == rows
    for tensor in (packed.tokens, packed.labels, packed.loss_mask, packed.positions):
        assert tensor.shape == (rows,)
        assert not tensor[5:].any()


@pytest.mark.parametrize("vocab_size", [4, 5])
def test_an_id_outside_the_vocabulary_names_its_document(vocab_size: int) -> None:
    micro_batch = MicroBatch((_local(0, 2), _local(1, 3)))
    with pytest.raises(ValueError, match=rf"document 1 tokens 0-3: token {vocab_size - 3} of the sample has the id"):
        pack_micro_batch(micro_batch, MemorySource([2, 3]), [0, 1], 1, [2, 3], vocab_size=vocab_size)
    pack_micro_batch(micro_batch, MemorySource([2, 3]), [0, 1], 1, [2, 3], vocab_size=6)


def test_to_a_device_keeps_all_values() -> None:
    packed = pack_micro_batch(MicroBatch((_local(0, 5),)), MemorySource([5]), [0], 4, [5])
    devices = ["cpu", "meta"] + (["cuda"] if torch.cuda.is_available() else [])
    for device in devices:
        moved = packed.to(device)
        assert moved.micro_batch is packed.micro_batch
        assert moved.documents == packed.documents
        for name in ("tokens", "labels", "positions", "loss_mask"):
            tensor = getattr(moved, name)
            assert tensor.device.type == device
            assert tensor.shape == (8,)
            if device != "meta":
                assert torch.equal(tensor.cpu(), getattr(packed, name))


class CountingSource(MemorySource):
    """A source that finds many lengths at once."""

    def lengths(self, indices: object) -> np.ndarray:
        assert isinstance(indices, np.ndarray)
        return np.array([self.length(i) for i in indices.tolist()], dtype=np.int64)


@pytest.mark.parametrize("source", [MemorySource([8, 3, 5]), CountingSource([8, 3, 5])])
def test_lengths_of_numbers_and_of_a_range(source: MemorySource) -> None:
    assert lengths_of(source, [2, 0]).tolist() == [5, 8]
    assert lengths_of(source, range(0, 3, 2)).tolist() == [8, 5]
    assert lengths_of(source, range(0)).dtype == np.int64
