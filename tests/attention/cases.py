"""Test cases: sequences on ranks, their values, expected results of dense attention, and functions that run them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch

from bytescale_ext.attention.backend import Backend, Exchanges
from bytescale_ext.attention.kernels.contract import Saved
from bytescale_ext.attention.kernels.table import Kernel, kernel_table
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.layout import AttentionLayout, attention_layout
from bytescale_ext.attention.layouts.parts import with_parts
from bytescale_ext.attention.layouts.rows import CuSeqlens
from bytescale_ext.attention.ring import attention_backward, attention_forward
from bytescale_ext.attention.sink import add_sink_, sink_gradient
from bytescale_ext.attention.virtual import MailboxComm, mailbox_comms, run_in_turn
from bytescale_ext.parallel.p2p import Comm
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
from bytescale_ext.plan.step.plan import StepPlan


@dataclass(frozen=True)
class Case:
    """Sequences, and the ranks that compute them.

    Attributes:
        lengths: tokens of each sequence.
        rounds: ``(seq, ring)`` of the sequences in each round of micro-batches.
        num_ranks: number of HDP ranks.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        dim: width of one head.
        num_padding: number of rows after the tokens of each micro-batch.
        inner_width: number of members of the inner rings of every ring whose width is a multiple of it; 0 for plain
            rings.
        window: number of earlier keys that a token attends to; None for all.
        sinks: whether each head has a sink.
        uneven: whether the members of rings have unlike shares.
        parts: sequences that are groups, and the lengths of their parts (``layouts/parts.py``).
    """

    lengths: tuple[int, ...]
    rounds: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    num_ranks: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    num_padding: int = 3
    inner_width: int = 0
    window: int | None = None
    sinks: bool = False
    uneven: bool = False
    parts: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def shares(self, seq: int, ring: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shares of the members of an uneven ring, each at least 1; empty for even shares."""
        length, width = self.lengths[seq], len(ring)
        if not self.uneven or width == 1 or length < 2 * width:
            return ()
        cuts = sorted(random.Random(seq).sample(range(1, length), width - 1))
        return tuple(stop - start for start, stop in pairwise((0, *cuts, length)))

    def inner_rings(self, ring: tuple[int, ...]) -> int:
        """Return the number of inner rings of a ring."""
        return 1 if not self.inner_width or len(ring) % self.inner_width else len(ring) // self.inner_width

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def micro_batch(self, number: int, rank: int) -> MicroBatch:
        """Return the micro-batch of ``rank`` in round ``number``."""
        shards = [
            replace(shard, ranges=shard.member_ranges(self.lengths[seq], ring.index(rank)))
            for seq, ring in sorted(self.rounds[number])
            if rank in ring
            for shard in [Shard(seq, (), ring, self.inner_rings(ring), self.shares(seq, ring))]
        ]
        return MicroBatch(tuple(sorted(shards, key=lambda shard: len(shard.ring) == 1)))

    def layout(self, number: int, rank: int) -> AttentionLayout:
        micro_batch = self.micro_batch(number, rank)
        num_rows = micro_batch.num_tokens + self.num_padding
        layout = attention_layout(micro_batch, rank, self.lengths, num_rows, self.window)
        return with_parts(layout, micro_batch.shards, layout.num_tokens, dict(self.parts))

    def sink(self) -> torch.Tensor | None:
        """Return the sink of each head, float64, or None."""
        generator = torch.Generator().manual_seed(7)
        return torch.randn(self.heads, generator=generator, dtype=torch.float64) if self.sinks else None

    def backend(self, comm: Comm | None, name: str = "reference", dtype: torch.dtype = torch.float64) -> Backend:
        """Return the attention settings and communication of one rank."""
        sink = self.sink()
        return Backend(comm, kernel_named(name), self.scale, None if sink is None else sink.to(dtype))

    def values(self, seq: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return ``q, k, v, dout`` of one sequence, equal on every rank."""
        generator = torch.Generator().manual_seed(1000 + seq)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return tuple(
            torch.randn(self.lengths[seq], count, self.dim, generator=generator, dtype=torch.float64).to(dtype)
            for count in heads
        )

    def rows(self, micro_batch: MicroBatch, of_sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the rows of a micro-batch from tensors of whole sequences, without padding."""
        parts = [of_sequences[shard.seq][a:b] for shard in micro_batch.shards for a, b in shard.ranges]
        return torch.cat(parts) if parts else of_sequences[0][:0]

    def inputs(self, number: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return ``q, k, v, dout`` of a micro-batch, with random values in the padding."""
        micro_batch = self.micro_batch(number, rank)
        columns = zip(*(self.values(seq, dtype) for seq in range(len(self.lengths))), strict=True)
        rows = [self.rows(micro_batch, column) for column in columns]
        generator = torch.Generator().manual_seed(rank)
        return [
            torch.cat((x, torch.randn(self.num_padding, *x.shape[1:], generator=generator).to(dtype))) for x in rows
        ]

    def planned_inputs(self, micro_batch: MicroBatch) -> list[torch.Tensor]:
        """Return ``q, k, v, dout`` of a micro-batch of a plan, float64, without padding."""
        columns = zip(*(self.values(seq, torch.float64) for seq in range(len(self.lengths))), strict=True)
        return [self.rows(micro_batch, column) for column in columns]

    def expected(self, dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, ...]]:
        """Return dense ``out, dq, dk, dv`` of each sequence in float64, from values rounded to ``dtype``."""
        return dense_answers(self, dtype)

    def expected_sink(self) -> torch.Tensor:
        """Return the gradient of the sinks, summed over all sequences, by dense attention in float64."""
        sink = self.sink()
        assert sink is not None
        total = torch.zeros_like(sink)
        for seq, length in enumerate(self.lengths):
            q, k, v, dout = self.values(seq, torch.float64)
            leaf = sink.clone().requires_grad_()
            out = dense_attention(q, k, v, (length,), self.scale, self.window, leaf)
            total += torch.autograd.grad(out, leaf, dout)[0]
        return total


@lru_cache(maxsize=8)  # cached for all ranks and slicings
def dense_answers(case: Case, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """See ``Case.expected``."""
    answers = []
    for seq, length in enumerate(case.lengths):
        q, k, v, dout = (x.double() for x in case.values(seq, dtype))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        of_group = dict(case.parts).get(seq)
        if of_group is None:
            out = dense_attention(q, k, v, (length,), case.scale, case.window, case.sink())
        else:
            out = group_attention((q, k, v), of_group, case.scale)
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
        for name, tensor, column in zip(("out", "dq", "dk", "dv"), got[:4], range(4), strict=True):
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


def block_of(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    causal: bool = True,
    scale: float = 0.3,
    window: int | None = None,
) -> AttentionBlock:
    """Return the block of documents of these lengths; by default each document's keys are its own tokens."""
    cu_k = CuSeqlens.of_lengths(lengths_q if lengths_k is None else lengths_k)
    return AttentionBlock(CuSeqlens.of_lengths(lengths_q), cu_k, causal, scale, window)


def block_tensors(
    block: AttentionBlock, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, dim: int = 16
) -> list[torch.Tensor]:
    """Return ``q, k, v, dout`` of a block."""
    generator = torch.Generator().manual_seed(1)
    num_q, num_k = block.cu_q.num_tokens, block.cu_k.num_tokens
    rows = ((num_q, heads), (num_k, kv_heads), (num_k, kv_heads), (num_q, heads))
    return [torch.randn(t, count, dim, generator=generator).to(dtype) for t, count in rows]


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention inside each document, written with a mask over all rows and differentiable by autograd.

    ``q``: [t, heads, dim]; ``k, v``: [t, kv_heads, dim]; rows after the documents are padding and give zeros.
    """
    t, group = q.shape[0], q.shape[1] // k.shape[1]
    document = torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.tensor([*lengths, t - sum(lengths)]))
    seen = (document[:, None] == document) & (document < len(lengths)) & torch.ones(t, t, dtype=torch.bool).tril()
    if window is not None:
        seen &= torch.arange(t)[:, None] - torch.arange(t) <= window
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink[:, None, None].expand(-1, t, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :t].masked_fill(~seen, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)


def group_attention(qkv: Sequence[torch.Tensor], parts: Sequence[int], scale: float) -> torch.Tensor:
    """Attention of a group: each document after the first part attends to a copy of that part, and to itself.

    ``qkv``: queries [t, heads, dim], keys and values [t, kv_heads, dim] of the parts, end to end.
    """
    (q0, *of_q), (k0, *of_k), (v0, *of_v) = (tensor.split(list(parts)) for tensor in qkv)
    out = [dense_attention(q0, k0, v0, (len(q0),), scale)]
    for rest in zip(of_q, of_k, of_v, strict=True):
        copy = [torch.cat(pair) for pair in zip((q0, k0, v0), rest, strict=True)]
        out.append(dense_attention(*copy, (len(copy[0]),), scale)[len(q0) :])
    return torch.cat(out)


def run_round(
    layouts: Sequence[AttentionLayout], inputs: Sequence[Sequence[torch.Tensor]], backends: Sequence[Backend]
) -> list[tuple[torch.Tensor, ...]]:
    """Return ``out, dq, dk, dv`` of one micro-batch of each virtual rank, and gradients of sinks or of an expansion.

    ``inputs`` are ``q, k, v, dout``.
    """
    ranks = list(zip(inputs, layouts, backends, strict=True))
    outputs = run_in_turn([attention_forward(q, k, v, layout, backend) for (q, k, v, _), layout, backend in ranks])
    for (out, lse), backend in zip(outputs, backends, strict=True):
        if backend.sink is not None:
            add_sink_(out, lse, backend.sink)
    backward = [backend.for_backward() for backend in backends]
    ranks = list(zip(inputs, layouts, backward, strict=True))
    grads = run_in_turn(
        [
            attention_backward(dout, Saved(q, k, v, *output), layout, backend)
            for ((q, k, v, dout), layout, backend), output in zip(ranks, outputs, strict=True)
        ]
    )
    found = []
    for ((*_, dout), _, backend), output, grad in zip(ranks, outputs, grads, strict=True):
        weights = sink_gradient(dout, *output, backend.sink), backend.expansion_gradient()
        found.append((output[0], *grad, *(one for one in weights if one is not None)))
    return found


def run_virtual(
    case: Case, name: str, dtype: torch.dtype, comms: Sequence[MailboxComm] | None = None
) -> tuple[Results, Sequence[MailboxComm]]:
    """Return ``out, dq, dk, dv`` of every round and rank, and the comms that were used: by default new ones."""
    comms = mailbox_comms(case.num_ranks) if comms is None else comms
    results: Results = {}
    ranks = range(case.num_ranks)
    for number in range(len(case.rounds)):
        inputs = [case.inputs(number, rank, dtype) for rank in ranks]
        backends = [case.backend(comm, name, dtype) for comm in comms]
        found = run_round([case.layout(number, rank) for rank in ranks], inputs, backends)
        results |= {(number, rank): found[rank] for rank in ranks}
    return results, comms


def plan_steps(case: Case, plan: StepPlan, comm: MailboxComm) -> Exchanges[list[tuple[torch.Tensor, ...]]]:
    """Run all micro-batches of one virtual rank; return ``out, dq, dk, dv`` of each, float64, without padding."""
    found = []
    for micro_batch in plan.ranks[comm.rank]:
        q, k, v, dout = case.planned_inputs(micro_batch)
        layout = attention_layout(micro_batch, comm.rank, plan.lengths, micro_batch.num_tokens)
        backend = case.backend(comm)
        out, lse = yield from attention_forward(q, k, v, layout, backend)
        found.append((out, *(yield from attention_backward(dout, Saved(q, k, v, out, lse), layout, backend))))
    return found


def planned(plan: StepPlan) -> Case:
    """Return a case with values of a plan's sequences. The plan decides the ranks that compute them."""
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
    """Run a plan on virtual ranks in float64 and check it against dense attention."""
    case = planned(plan)
    comms = mailbox_comms(plan.num_ranks)
    assert_planned_matches(plan, run_in_turn([plan_steps(case, plan, comm) for comm in comms]))


def whole(length: int, ring: tuple[int, ...], **shape: int) -> Case:
    """Return the case of one sequence on one ring."""
    return Case((length,), (((0, ring),),), max(ring) + 1, **shape)


# Rings of 1, 2, 3 and 4 ranks, packs next to them, odd and tiny lengths. Rank 1 is in overlapping rings, in the same
# micro-batch and in successive micro-batches. Rank 3 has an empty round.
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
# Several documents of odd lengths on each of the rings of 2, 3 and 4 ranks, in alternation, so that the rows of a ring
# are not adjacent. Documents with one token per rank have no back rows.
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
