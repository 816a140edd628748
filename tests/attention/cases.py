"""Steps with known answers: who holds which sequence, the values of its tokens, and its dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bytescale_ext.attention.layout import AttentionLayout, CuSeqlens, attention_layout
from bytescale_ext.attention.reference import dense_attention
from bytescale_ext.plan.shapes import MicroBatch, Shard, zigzag_ranges


@dataclass(frozen=True)
class Case:
    """Sequences and where they are computed.

    Attributes:
        lengths: tokens of each sequence.
        rounds: for each round of micro-batches, ``(seq, ring)`` of the sequences in it.
        num_ranks: HDP ranks.
        heads, kv_heads, dim: of the attention.
        num_padding: rows after the tokens of each micro-batch.
    """

    lengths: tuple[int, ...]
    rounds: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    num_ranks: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    num_padding: int = 3

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def micro_batch(self, number: int, rank: int) -> MicroBatch:
        """What ``rank`` computes in round ``number``."""
        shards = [
            Shard(seq, zigzag_ranges(self.lengths[seq], len(ring), ring.index(rank)), ring)
            for seq, ring in sorted(self.rounds[number])
            if rank in ring
        ]
        return MicroBatch(tuple(sorted(shards, key=lambda shard: len(shard.ring) == 1)))

    def layout(self, number: int, rank: int) -> AttentionLayout:
        micro_batch = self.micro_batch(number, rank)
        return attention_layout(micro_batch, rank, self.lengths, micro_batch.num_tokens + self.num_padding)

    def values(self, seq: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """``q, k, v, dout`` of one sequence, the same wherever they are made."""
        generator = torch.Generator().manual_seed(1000 + seq)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return tuple(
            torch.randn(self.lengths[seq], count, self.dim, generator=generator, dtype=torch.float64).to(dtype)
            for count in heads
        )

    def rows(self, micro_batch: MicroBatch, of_sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows of a micro-batch taken from tensors of whole sequences, without padding."""
        parts = [of_sequences[shard.seq][a:b] for shard in micro_batch.shards for a, b in shard.ranges]
        return torch.cat(parts) if parts else of_sequences[0][:0]

    def inputs(self, number: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """``q, k, v, dout`` of a micro-batch; the padding holds noise that nothing may see."""
        micro_batch = self.micro_batch(number, rank)
        columns = zip(*(self.values(seq, dtype) for seq in range(len(self.lengths))), strict=True)
        rows = [self.rows(micro_batch, column) for column in columns]
        generator = torch.Generator().manual_seed(rank)
        return [
            torch.cat((x, torch.randn(self.num_padding, *x.shape[1:], generator=generator).to(dtype))) for x in rows
        ]

    def expected(self, dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, ...]]:
        """``out, dq, dk, dv`` of each sequence by dense attention in float64, from values rounded to ``dtype``."""
        answers = []
        for seq, length in enumerate(self.lengths):
            q, k, v, dout = (x.double() for x in self.values(seq, dtype))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = dense_attention(q, k, v, CuSeqlens((0, length)), self.scale)
            answers.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
        return answers


Results = dict[tuple[int, int], tuple[torch.Tensor, ...]]


def assert_matches(case: Case, results: Results, tolerance: float, dtype: torch.dtype = torch.float64) -> None:
    """Check ``out, dq, dk, dv`` of each ``(round, rank)`` against dense attention; padding rows must be zero.

    The error is relative to the largest value of the sequence's tensor, but at least 0.1 (dq of one token is 0).
    """
    expected = case.expected(dtype)
    for (number, rank), got in results.items():
        micro_batch = case.micro_batch(number, rank)
        for name, tensor, column in zip(("out", "dq", "dk", "dv"), got, range(4), strict=True):
            assert not tensor[micro_batch.num_tokens :].any(), f"{name} of padding on rank {rank}"
            start = 0
            for shard in micro_batch.shards:
                whole = expected[shard.seq][column]
                wanted = torch.cat([whole[a:b] for a, b in shard.ranges])
                difference = (tensor[start : start + shard.num_tokens].double() - wanted).abs().max()
                error = float(difference / whole.abs().max().clamp_min(0.1))
                assert error <= tolerance, f"{name} {error=:.2e} {rank=} {number=} {shard=}"
                start += shard.num_tokens


def whole(length: int, ring: tuple[int, ...], **shape: int) -> Case:
    """One sequence on one ring."""
    return Case((length,), (((0, ring),),), max(ring) + 1, **shape)


# Rings of 1, 2, 3 and 4 ranks, packs beside them, odd and tiny lengths; rank 1 is in overlapping rings of one
# micro-batch and of successive ones, rank 3 has a round with nothing.
MIXED = Case(
    lengths=(37, 5, 3, 29, 4, 1, 2, 18, 64, 7, 13),
    rounds=(
        ((0, (0, 1)), (3, (1, 2, 3)), (1, (0,)), (2, (0,)), (5, (2,)), (6, (2,)), (4, (3,))),
        ((7, (0, 1, 2)), (8, (0, 1)), (9, (2,))),
        ((10, (0, 1, 2, 3)),),
    ),
    num_ranks=4,
)
TINY = Case(
    lengths=(1, 2, 2, 3, 3, 4, 5, 5),
    rounds=(
        (
            (0, (0,)),
            (1, (0, 1)),
            (2, (1, 2)),
            (3, (0, 1, 2)),
            (4, (2, 3)),
            (5, (0, 1, 2, 3)),
            (6, (1, 2, 3)),
            (7, (3,)),
        ),
    ),
    num_ranks=4,
)
