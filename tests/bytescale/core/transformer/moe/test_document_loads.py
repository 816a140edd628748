"""Loads of documents in rings and slices are the loads of whole documents."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from bytescale_ext.data.samples.packed import PackedMicroBatch
from bytescale_ext.parallel.p2p import Transfer
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from megatron.bytescale.core.transformer.moe.document_loads import DocumentLoads, RoutedRows, documents_of_rows

EXPERTS, TOPK = 4, 2
LENGTHS = (8, 3, 6, 8)
RING = (0, 1)
CPU = torch.device("cpu")
GROUP: Any = SimpleNamespace(size=lambda: 1)


def scores_of(seq: int, ranges: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores and choices of tokens of a document, both [tokens, experts]."""
    whole = torch.rand(LENGTHS[seq], EXPERTS, generator=torch.Generator().manual_seed(seq)).softmax(-1)
    scores = torch.cat([whole[start:stop] for start, stop in ranges])
    return scores, torch.zeros_like(scores).scatter(1, scores.topk(TOPK).indices, 1).bool()


class PairComm:
    """The messages of rank 0 to rank 1, both in this process; ``theirs`` holds the messages of rank 1."""

    def __init__(self, theirs: list[torch.Tensor]) -> None:
        self.theirs, self.sent = theirs, 0

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Any:
        for (received, peer), message in zip(receives, self.theirs, strict=True):
            assert peer == 1
            received.copy_(message)
        self.sent = sum(tensor.numel() * tensor.element_size() for tensor, _ in sends)
        return SimpleNamespace(wait=lambda: None)


def packed(shards: Sequence[Shard], padding: int) -> Any:
    micro_batch = MicroBatch(tuple(shards))
    return SimpleNamespace(micro_batch=micro_batch, num_rows=micro_batch.num_tokens + padding)


def add(loads: DocumentLoads, all_shards: Sequence[Shard], part: Sequence[Shard], index: int) -> Any:
    unit: PackedMicroBatch = packed(part, padding=2)
    routed = RoutedRows(loads, index, documents_of_rows(unit, all_shards))
    scores, chosen = (
        torch.cat([*parts, torch.zeros(2, EXPERTS)])
        for parts in zip(*(scores_of(shard.seq, shard.ranges) for shard in part), strict=True)
    )
    return loads.add("router", routed, scores, chosen.bool())


def shards_of(rank: int) -> list[Shard]:
    """Return the shards of two documents in a ring of two ranks and, on rank 0, of two local documents."""
    rings = [Shard(seq, zigzag_ranges(LENGTHS[seq], 2, rank), RING) for seq in (0, 3)]
    local = [Shard(seq, ((0, LENGTHS[seq]),), (0,)) for seq in (1, 2)]
    return [*rings, *local] if rank == 0 else rings


def test_parts_in_a_ring_and_in_slices_add_up_to_documents() -> None:
    mine, theirs = (DocumentLoads.of(shards_of(rank), LENGTHS, 2 - rank, CPU) for rank in (0, 1))
    other = add(theirs, shards_of(1), shards_of(1), 0)
    shards = shards_of(0)
    split = shards[2]
    assert add(mine, shards, [shards[0], Shard(1, ((0, 1),), (0,))], 0) is None
    last = add(mine, shards, [shards[1], Shard(split.seq, ((1, 3),), (0,)), shards[3]], 1)
    assert add(mine, shards, [shards[0]], 0) is None, "a recomputed slice counts once"
    comm = PairComm([other.tokens])
    mine.share(last, GROUP, comm, 0)
    expected = [scores_of(shard.seq, ((0, LENGTHS[shard.seq]),))[1].sum(0) for shard in shards]
    assert torch.equal(last.tokens, torch.stack(expected).int())
    assert comm.sent == 2 * 4 * EXPERTS
    assert torch.allclose(last.scores.sum(), torch.tensor(float(2 * 4 + 3 + 6)))


def test_the_gradient_is_of_the_mean_over_documents() -> None:
    shards = [Shard(seq, ((0, LENGTHS[seq]),), (0,)) for seq in range(3)]
    loads = DocumentLoads.of(shards, LENGTHS, 1, CPU)
    done = add(loads, shards, shards, 0)
    weights = loads.weights(done, TOPK)
    for index, shard in enumerate(shards):
        scores, chosen = scores_of(shard.seq, shard.ranges)
        scores.requires_grad_()
        loss = EXPERTS * (chosen.float().mean(0) / TOPK * scores.mean(0)).sum() * LENGTHS[shard.seq]
        (expected,) = torch.autograd.grad(loss, scores)
        torch.testing.assert_close(weights[index].expand_as(expected), expected)


def test_a_micro_batch_of_padding_has_no_loss() -> None:
    loads = DocumentLoads.of((), (), 1, CPU)
    unit = packed([], padding=3)
    routed = RoutedRows(loads, 0, documents_of_rows(unit, ()))
    done = loads.add("router", routed, torch.zeros(3, EXPERTS), torch.zeros(3, EXPERTS, dtype=torch.bool))
    assert done is not None
    assert not loads.weights(done, TOPK).any()
