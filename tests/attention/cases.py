"""Steps with known answers: who holds which sequence, the values of its tokens, and its dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bytescale_ext.attention.kernels import Kernel, kernel_table
from bytescale_ext.attention.layout import AttentionLayout, attention_layout
from bytescale_ext.attention.reference import dense_attention
from bytescale_ext.attention.ring import RingContext, Steps, backward_steps, forward_steps
from bytescale_ext.attention.rows import CuSeqlens
from bytescale_ext.attention.virtual import MailboxComm, mailbox_comms, run_in_turn
from bytescale_ext.plan.shapes import MicroBatch, Shard, StepPlan, zigzag_ranges


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

    def planned_inputs(self, micro_batch: MicroBatch) -> list[torch.Tensor]:
        """``q, k, v, dout`` of a micro-batch of a plan, float64, without padding."""
        columns = zip(*(self.values(seq, torch.float64) for seq in range(len(self.lengths))), strict=True)
        return [self.rows(micro_batch, column) for column in columns]

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


def kernel_named(name: str) -> Kernel:
    return next(row for row in kernel_table() if row.name == name)


def run_virtual(case: Case, name: str, dtype: torch.dtype) -> tuple[Results, list[MailboxComm]]:
    """``out, dq, dk, dv`` of every round and rank, and the comms that were used."""
    comms = mailbox_comms(case.num_ranks)
    results: Results = {}
    ranks = range(case.num_ranks)
    for number in range(len(case.rounds)):
        inputs = [case.inputs(number, rank, dtype) for rank in ranks]
        rings = [RingContext(case.layout(number, rank), comms[rank], kernel_named(name), case.scale) for rank in ranks]
        outputs = run_in_turn([forward_steps(*inputs[rank][:3], rings[rank]) for rank in ranks])
        grads = run_in_turn(
            [backward_steps(inputs[rank][3], *inputs[rank][:3], *outputs[rank], rings[rank]) for rank in ranks]
        )
        results |= {(number, rank): (outputs[rank][0], *grads[rank]) for rank in ranks}
    return results, comms


def plan_steps(case: Case, plan: StepPlan, comm: MailboxComm) -> Steps[list[tuple[torch.Tensor, ...]]]:
    """One virtual rank runs all its micro-batches; ``out, dq, dk, dv`` of each, float64, without padding."""
    found = []
    for micro_batch in plan.ranks[comm.rank]:
        q, k, v, dout = case.planned_inputs(micro_batch)
        layout = attention_layout(micro_batch, comm.rank, plan.lengths, micro_batch.num_tokens)
        ring = RingContext(layout, comm, kernel_named("reference"), case.scale)
        out, lse = yield from forward_steps(q, k, v, ring)
        found.append((out, *(yield from backward_steps(dout, q, k, v, out, lse, ring))))
    return found


def planned(plan: StepPlan) -> Case:
    """The values of a plan's sequences; the plan says where they are computed."""
    return Case(plan.lengths, ((),), plan.num_ranks, num_padding=0)


def assert_planned_matches(plan: StepPlan, results: Sequence[Sequence[tuple[torch.Tensor, ...]]]) -> None:
    """Check ``out, dq, dk, dv`` of each rank and micro-batch, without padding, against dense attention."""
    case = planned(plan)
    columns = list(zip(*case.expected(), strict=True))
    for row, found in zip(plan.ranks, results, strict=True):
        for micro_batch, tensors in zip(row, found, strict=True):
            for tensor, column in zip(tensors, columns, strict=True):
                torch.testing.assert_close(tensor, case.rows(micro_batch, column), rtol=1e-10, atol=1e-10)


def assert_plan_is_exact(plan: StepPlan) -> None:
    """Run a plan on virtual ranks, each in its own time, in float64."""
    case = planned(plan)
    comms = mailbox_comms(plan.num_ranks)
    assert_planned_matches(plan, run_in_turn([plan_steps(case, plan, comm) for comm in comms]))


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
# Several documents of odd lengths on each of the rings of 2, 3 and 4 ranks, in turns, so that the rows of a ring are
# not adjacent; documents of as many tokens as ranks have no back rows.
ALL, FIRST_TWO, LAST_THREE = (0, 1, 2, 3), (0, 1), (1, 2, 3)
GROUPS = Case(
    lengths=(37, 41, 3, 4, 29, 2, 5, 3, 33, 9, 6, 23, 11),
    rounds=(
        (
            (0, ALL),
            (1, FIRST_TWO),
            (2, LAST_THREE),
            (3, ALL),
            (4, LAST_THREE),
            (5, FIRST_TWO),
            (6, ALL),
            (7, (3,)),
            (8, FIRST_TWO),
        ),
        ((9, (0, 1, 2)), (10, (0, 1, 2)), (11, (0, 1, 2)), (12, (3,))),
    ),
    num_ranks=4,
)
