"""Ring attention over any number of ranks, for all sequences of a micro-batch at once.

Sequences that share a ring of D ranks make one pass. Their keys and values travel together from each member to the
next, D-1 times, and every member computes one block per step while the next keys are on their way::

    step           0              1              2
    compute        own triangles  keys of 1st    keys of 2nd      member before me on the way round
    on the way     keys of 1st    keys of 2nd    -

Blocks are joined by their log-sum-exp (``merge.py``). In the backward pass the keys travel again and the sums of
their gradients travel one step behind them; after the last step those are one rank away from home. Where keys are kept
from slice to slice (``KeptKeys``) only those of the slice travel, and in the backward pass the sums alone: what later
slices have added to them goes along. The geometry of blocks is in ``layout.py``; sections 5.1 and 7 of ByteScale and
Liu et al., "Ring Attention", are the sources.

The algorithm is a generator that yields each exchange where it must be complete. ``drive`` waits for it between
processes; ``virtual.run_in_turn`` runs several ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch

from bytescale_ext.attention.kernels import Kernel, Tensors3
from bytescale_ext.attention.layout import AttentionLayout, RingBlock, RingPass
from bytescale_ext.attention.merge import merge_
from bytescale_ext.attention.reference import accumulation_dtype
from bytescale_ext.attention.rows import Rows
from bytescale_ext.parallel.p2p import Comm, Pending

type Steps[Result] = Generator[Pending, None, Result]
# dout, q, k, v, out, lse of some rows
Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RingContext:
    """What every block needs beside its tensors."""

    layout: AttentionLayout
    comm: Comm
    kernel: Kernel
    scale: float


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: AttentionLayout,
    comm: Comm,
    kernel: Kernel,
    scale: float,
) -> torch.Tensor:
    """Causal attention of every sequence of a micro-batch, differentiable once.

    Args:
        q: ``[t, heads, dim]``, ``t == layout.num_rows``.
        k, v: ``[t, kv_heads, dim]``, the dtype of ``q``; ``heads`` is a multiple of ``kv_heads``.
        layout: the rows of this rank; all members of a ring must hold layouts of the same plan.
        comm: exchange between HDP ranks. Every member of a ring must call this function for the micro-batches that
            share a sequence in the same order (also in a recomputation), and run or not run their backward
            passes alike.
        kernel: one row of ``kernels.kernel_table()``.
        scale: factor of the scores, usually ``dim ** -0.5``.

    Returns:
        ``[t, heads, dim]`` in the dtype of ``q``; padding rows are zero, as are their gradients.

    Raises:
        ValueError: tensors that do not fit the layout or each other.
        RuntimeError: from the backend when a peer has died.
    """
    check_tensors(q, k, v, layout.num_rows)
    out: torch.Tensor = RingAttention.apply(q, k, v, RingContext(layout, comm, kernel, scale))
    return out


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_rows: int) -> None:
    """Raise ValueError unless queries, keys and values fit each other and have ``num_rows`` rows."""
    if q.shape[0] != num_rows or k.shape != v.shape or k.shape[0] != q.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"ring attention over {num_rows} rows needs q [rows, heads, dim] and k, v [rows, kv_heads, dim]; "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[1] or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"ring attention needs heads to be a multiple of kv_heads and one dtype; got {q.shape[1]} and {k.shape[1]} "
            f"heads, {q.dtype}, {k.dtype}, {v.dtype}"
        )


class RingAttention(torch.autograd.Function):
    """One node for the whole micro-batch; saves q, k, v, out and lse, and no keys of other ranks."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: RingContext) -> torch.Tensor:
        out, lse = drive(forward_steps(q, k, v, ring))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = drive(backward_steps(dout.contiguous(), q, k, v, out, lse, ctx.ring))
        return dq, dk, dv, None


def drive[Result](steps: Steps[Result]) -> Result:
    """Run an algorithm between processes: wait for each exchange that it yields."""
    while True:
        try:
            pending = next(steps)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        pending.wait()


def forward_steps(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: RingContext
) -> Steps[tuple[torch.Tensor, torch.Tensor]]:
    """The forward pass: ``out [t, heads, dim]`` and ``lse [heads, t]`` (minus infinity on padding rows).

    Passes run in the order of the layout. Local documents are computed while the first keys are on their way.
    Of a slice, ``k`` and ``v`` are those of the micro-batch, of which this rank's own are written up to the end of the
    slice; those of other members that are kept are written here.
    """
    layout = ring.layout
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)

    def compute_local() -> None:
        rows = slice(layout.local_start, layout.num_tokens)
        if rows.stop > rows.start:
            documents = (layout.local, layout.local, True, ring.scale)
            keys = layout.local_keys
            out[rows], lse[:, rows] = ring.kernel.forward(q[rows], keys.take(k), keys.take(v), *documents)
        if layout.local_prefix is not None:
            _merge_block(out, lse, q, k, v, layout.local_prefix, ring)

    for number, ring_pass in enumerate(layout.passes):
        mine = ring_pass.in_micro_batch
        meanwhile = compute_local if number == 0 else _nothing
        part, part_lse = yield from _forward_pass(mine.take(q), k, v, ring_pass, ring, meanwhile)
        mine.put_(out, part)
        mine.put_(lse, part_lse, dim=1)
    if not layout.passes:
        compute_local()
    return out, lse


def _forward_pass(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ring_pass: RingPass,
    ring: RingContext,
    meanwhile: Callable[[], None],
) -> Steps[tuple[torch.Tensor, torch.Tensor]]:
    """One pass: ``out [rows, heads, dim]`` in the accumulation dtype and ``lse [heads, rows]`` of my rows.

    ``q``: of these rows; ``k``, ``v``: of the micro-batch.
    """
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype, device=q.device)
    travelling = _Travelling(k, v, ring_pass, ring.comm)
    for step in range(ring_pass.width):
        # Posted before the block is computed, so that the transfer hides behind it.
        arriving = travelling.post(step)
        keys, values = travelling.here(step)
        if step == 0:
            meanwhile()
        for block in ring_pass.at(step):
            if block.causal:  # the first, of all rows
                part, part_lse = _forward_block(q, keys, values, block, ring)
                out.copy_(part)
                lse.copy_(part_lse)
            else:
                _merge_block(out, lse, q, keys, values, block, ring)
        if arriving is not None:
            yield arriving
            travelling.arrive(step + 1)
    return out, lse


def _forward_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: RingBlock, ring: RingContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of the block's queries over its keys."""
    tensors = (block.queries.take(q), block.keys.take(k), block.keys.take(v))
    return ring.kernel.forward(*tensors, block.cu_q, block.cu_k, block.causal, ring.scale)


def _merge_block(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: RingBlock,
    ring: RingContext,
) -> None:
    """Compute a block and join it to the totals ``out`` and ``lse``."""
    rows = block.queries
    total_out, total_lse = rows.take(out), rows.take(lse, dim=1)
    precise = total_out.to(lse.dtype)  # itself in a ring pass, whose totals are in the accumulation dtype
    merge_(precise, total_lse, *_forward_block(q, k, v, block, ring))
    if not rows.is_view or precise is not total_out:
        rows.put_(out, precise)
    if not rows.is_view:
        rows.put_(lse, total_lse, dim=1)


def backward_steps(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ring: RingContext,
    sums: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Steps[Tensors3]:
    """The backward pass: ``dq [t, heads, dim]`` and ``dk, dv`` of the shape of ``k, v``.

    With ``sums`` the gradients of keys and values are added to those two tensors, which are returned.
    Passes run in the same order as in the forward pass. Local documents come last, while gradients of my keys are
    on their way home.
    """
    layout = ring.layout
    dq = torch.zeros_like(q)
    dk, dv = sums if sums is not None else (torch.zeros_like(k), torch.zeros_like(v))
    coming_home: list[tuple[Rows, torch.Tensor | None, torch.Tensor, Pending]] = []
    saved: Saved
    for ring_pass in layout.passes:
        mine = ring_pass.in_micro_batch
        saved = (mine.take(dout), mine.take(q), k, v, mine.take(out), mine.take(lse, dim=1))
        part, own, others, pending = yield from _backward_pass(saved, dk, dv, ring_pass, ring)
        mine.put_(dq, part)
        coming_home.append((ring_pass.sent_keys, own, others, pending))
    rows, keys = slice(layout.local_start, layout.num_tokens), layout.local_keys
    if rows.stop > rows.start:
        saved = (dout[rows], q[rows], keys.take(k), keys.take(v), out[rows], lse[:, rows])
        dq[rows], *grads = ring.kernel.backward(*saved, layout.local, layout.local, True, ring.scale)
        keys.add_(dk, grads[0])
        keys.add_(dv, grads[1])
    if layout.local_prefix is not None:
        block = layout.local_prefix
        for total, rows_of, grad in zip(
            (dq, dk, dv), (block.queries, block.keys, block.keys),
            _block_grads((dout, q, k, v, out, lse), block, ring), strict=True,
        ):  # fmt: skip
            rows_of.add_(total, grad)
    for keys, own, others, pending in coming_home:
        yield pending
        if own is not None:
            others.add_(own)
        keys.add_(dk, others[0])
        keys.add_(dv, others[1])
    return dq, dk, dv


def _block_grads(saved: Saved, block: RingBlock, ring: RingContext) -> Tensors3:
    """Gradients of the block's queries, keys and values."""
    dout, q, k, v, out, lse = saved
    rows, keys = block.queries, block.keys
    tensors = (rows.take(dout), rows.take(q), keys.take(k), keys.take(v), rows.take(out), rows.take(lse, dim=1))
    return ring.kernel.backward(*tensors, block.cu_q, block.cu_k, block.causal, ring.scale)


def _backward_pass(
    saved: Saved, dk: torch.Tensor, dv: torch.Tensor, ring_pass: RingPass, ring: RingContext
) -> Steps[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, Pending]]:
    """One pass: ``dq`` of my rows, my part of my keys' gradients, the other ranks' and the exchange that brings those.

    Sums of gradients are ``[2, rows, kv_heads, dim]`` (keys, values) in the accumulation dtype. The other ranks' sum
    starts at the next member in step 1, so it makes D-1 hops and the last one ends here.

    Args:
        saved: of my rows; keys and values of the micro-batch.
        dk, dv: sums of the micro-batch. My part of the gradients of keys that are kept is added to them (then it is
            None in what is returned).
    """
    dout, q, k, v, out, lse = saved
    dq = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    travelling = _Travelling(k, v, ring_pass, ring.comm)
    kept = ring_pass.kept
    arriving_sums: Pending | None = None
    own: torch.Tensor | None = None
    sums = _key_sums(ring_pass.travelling(ring_pass.source(1)), k)
    for step in range(ring_pass.width):
        arriving = travelling.post(step) if kept is None else None
        keys, values = travelling.here(step)
        computed = [
            (block, _block_grads((dout, q, keys, values, out, lse), block, ring)) for block in ring_pass.at(step)
        ]
        for block, grads in computed:
            block.queries.add_(dq, grads[0])
        if arriving_sums is not None:
            yield arriving_sums
        total = _key_sums(len(keys), k) if step == 0 or kept is not None else sums
        for block, grads in computed:
            block.keys.add_(total[0], grads[1])
            block.keys.add_(total[1], grads[2])
        if kept is not None:
            source = ring_pass.source(step)
            _add_kept((dk, dv), total, sums if step else None, kept.whole[source], kept.own[source])
        elif step == 0:
            own = total
        if step > 0:
            # The sum of these keys goes after them; the sum of my next keys comes, at last that of my own.
            next_sums = _key_sums(ring_pass.travelling(ring_pass.source(step + 1)), k, filled=False)
            arriving_sums = ring.comm.exchange([(sums, ring_pass.next_rank)], [(next_sums, ring_pass.previous_rank)])
            sums = next_sums
        if arriving is not None:
            yield arriving
            travelling.arrive(step + 1)
    assert arriving_sums is not None, f"{ring_pass=}"
    return dq, own, sums, arriving_sums


def _add_kept(
    buffers: tuple[torch.Tensor, torch.Tensor],
    part: torch.Tensor,
    travelling: torch.Tensor | None,
    whole: Rows,
    own: Rows,
) -> None:
    """Add gradients of a member's keys to the micro-batch's, and the slice's sum to the one that goes to the member."""
    for index, buffer in enumerate(buffers):
        whole.add_(buffer, part[index])
        if travelling is not None:
            travelling[index].add_(own.take(buffer))


class _Travelling:
    """The keys and values of a pass on their way round the ring.

    Args:
        k, v: of the micro-batch; keys of others that are kept are written to it when they arrive.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, ring_pass: RingPass, comm: Comm) -> None:
        self._buffers = (k, v)
        self._pass = ring_pass
        self._comm = comm
        self._here = self._next = k[:0]  # nothing yet; kept keys do not travel in the backward pass

    def post(self, step: int) -> Pending | None:
        """Send the keys of this step on and start receiving those of the next; nothing after the last step."""
        if step == self._pass.width - 1:
            return None
        if step == 0:
            self._here = torch.stack([self._pass.sent_keys.take(buffer) for buffer in self._buffers])
        rows = self._pass.travelling(self._pass.source(step + 1))
        self._next = self._here.new_empty((2, rows, *self._here.shape[2:]))
        return self._comm.exchange([(self._here, self._pass.next_rank)], [(self._next, self._pass.previous_rank)])

    def arrive(self, step: int) -> None:
        """The keys of a step have been received."""
        self._here = self._next
        if self._pass.kept is not None:
            for buffer, received in zip(self._buffers, self._here, strict=True):
                self._pass.kept.own[self._pass.source(step)].put_(buffer, received)

    def here(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the step's blocks: ``[rows, kv_heads, dim]`` each."""
        if self._pass.kept is None:
            return self._here[0], self._here[1]
        rows = self._pass.kept.whole[self._pass.source(step)]
        return rows.take(self._buffers[0]), rows.take(self._buffers[1])


def _key_sums(num_rows: int, keys: torch.Tensor, filled: bool = True) -> torch.Tensor:
    """A sum for the gradients of so many keys and values, of zeros or not ``filled``."""
    make = torch.zeros if filled else torch.empty
    return make((2, num_rows, *keys.shape[1:]), dtype=accumulation_dtype(keys.dtype), device=keys.device)


def _nothing() -> None:
    return None
