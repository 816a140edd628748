"""Ring attention over any number of ranks, for all sequences of a micro-batch at once.

Each shared sequence has a ring of D ranks. Its keys and values travel from each member to the next, D-1 times, and
every member computes one block per step while the next keys are on their way::

    step           0              1              2
    compute        own triangle   keys of i-1    keys of i-2
    on the way     keys of i-1    keys of i-2    -

Blocks are joined by their log-sum-exp (``merge.py``). In the backward pass the keys travel again and the sums of
their gradients travel one step behind them; after the last step those are one rank away from home. The geometry
of blocks is in ``layout.py``; sections 5.1 and 7 of ByteScale and Liu et al., "Ring Attention", are the sources.

The algorithm is a generator that yields each exchange where it must be complete. ``drive`` waits for it between
processes; ``virtual.run_in_turn`` runs several ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch

from bytescale_ext.attention.kernels import Kernel
from bytescale_ext.attention.layout import AttentionLayout, RingShard
from bytescale_ext.attention.merge import merge_
from bytescale_ext.attention.reference import accumulation_dtype
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
    if q.shape[0] != layout.num_rows or k.shape != v.shape or k.shape[0] != q.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"ring attention over {layout.num_rows} rows needs q [rows, heads, dim] and k, v [rows, kv_heads, dim]; "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[1] or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"ring attention needs heads to be a multiple of kv_heads and one dtype; got {q.shape[1]} and {k.shape[1]} "
            f"heads, {q.dtype}, {k.dtype}, {v.dtype}"
        )
    out: torch.Tensor = RingAttention.apply(q, k, v, RingContext(layout, comm, kernel, scale))
    return out


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

    Rings run in the order of the layout. Local documents are computed while the first keys are on their way.
    """
    layout = ring.layout
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)

    def compute_local() -> None:
        rows = slice(layout.local_start, layout.num_tokens)
        if rows.stop > rows.start:
            documents = (layout.local, layout.local, True, ring.scale)
            out[rows], lse[:, rows] = ring.kernel.forward(q[rows], k[rows], v[rows], *documents)

    for number, shard in enumerate(layout.rings):
        rows = slice(shard.start, shard.start + shard.num_rows)
        meanwhile = compute_local if number == 0 else _nothing
        out[rows], lse[:, rows] = yield from _forward_ring(q[rows], k[rows], v[rows], shard, ring, meanwhile)
    if not layout.rings:
        compute_local()
    return out, lse


def _forward_ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shard: RingShard,
    ring: RingContext,
    meanwhile: Callable[[], None],
) -> Steps[tuple[torch.Tensor, torch.Tensor]]:
    """One ring: ``out [rows, heads, dim]`` in the accumulation dtype and ``lse [heads, rows]`` of my rows."""
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype, device=q.device)
    kv = torch.stack((k, v))
    for step, block in enumerate(shard.blocks):
        # Posted before the block is computed, so that the transfer hides behind it.
        arriving, next_kv = _post_keys(kv, shard, step, ring.comm)
        if step == 0:
            meanwhile()
        if not block.is_empty:
            rows = slice(block.query_start, block.query_stop)
            keys, values = kv[:, : block.num_keys].unbind()
            part, part_lse = ring.kernel.forward(
                q[rows], keys, values, block.cu_q, block.cu_k, block.causal, ring.scale
            )
            if step == 0:
                out.copy_(part)
                lse.copy_(part_lse)
            else:
                merge_(out[rows], lse[:, rows], part, part_lse)
        if arriving is not None:
            yield arriving
            kv = next_kv
    return out, lse


def backward_steps(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ring: RingContext,
) -> Steps[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The backward pass: ``dq [t, heads, dim]`` and ``dk, dv [t, kv_heads, dim]``.

    Rings run in the same order as in the forward pass. Local documents come last, while gradients of my keys are
    on their way home.
    """
    layout = ring.layout
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    coming_home: list[tuple[slice, torch.Tensor, torch.Tensor, Pending]] = []
    mine: Saved
    for shard in layout.rings:
        rows = slice(shard.start, shard.start + shard.num_rows)
        mine = (dout[rows], q[rows], k[rows], v[rows], out[rows], lse[:, rows])
        dq[rows], own, others, pending = yield from _backward_ring(mine, shard, ring)
        coming_home.append((rows, own, others, pending))
    rows = slice(layout.local_start, layout.num_tokens)
    if rows.stop > rows.start:
        mine = (dout[rows], q[rows], k[rows], v[rows], out[rows], lse[:, rows])
        dq[rows], dk[rows], dv[rows] = ring.kernel.backward(*mine, layout.local, layout.local, True, ring.scale)
    for rows, own, others, pending in coming_home:
        yield pending
        dk[rows], dv[rows] = own.add_(others)
    return dq, dk, dv


def _backward_ring(
    saved: Saved, shard: RingShard, ring: RingContext
) -> Steps[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Pending]]:
    """One ring: ``dq``, my part of my keys' gradients, the other ranks' part and the exchange that brings it.

    Key gradients are ``[2, rows, kv_heads, dim]`` (keys, values) in the accumulation dtype. The other ranks' sum
    starts at the next member in step 1, so it makes D-1 hops and the last one ends here.
    """
    dout, q, k, v, out, lse = saved
    dq = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    kv = torch.stack((k, v))
    own = _key_sums(shard, 0, kv)
    arriving_sums: Pending | None = None
    sums = _key_sums(shard, 1, kv)
    for step, block in enumerate(shard.blocks):
        arriving, next_kv = _post_keys(kv, shard, step, ring.comm)
        grads = None
        if not block.is_empty:
            rows = slice(block.query_start, block.query_stop)
            keys, values = kv[:, : block.num_keys].unbind()
            mine = (dout[rows], q[rows], keys, values, out[rows], lse[:, rows])
            grads = ring.kernel.backward(*mine, block.cu_q, block.cu_k, block.causal, ring.scale)
            dq[rows].add_(grads[0])
        if arriving_sums is not None:
            yield arriving_sums
        _add_key_gradients(own if step == 0 else sums, grads)
        if step > 0:
            # The sum of these keys goes after them; the sum of my next keys comes, at last that of my own.
            next_sums = _key_sums(shard, step + 1, kv, filled=False)
            arriving_sums = ring.comm.exchange([(sums, shard.next_rank)], [(next_sums, shard.previous_rank)])
            sums = next_sums
        if arriving is not None:
            yield arriving
            kv = next_kv
    assert arriving_sums is not None, f"{shard=}"
    return dq, own, sums, arriving_sums


def _post_keys(kv: torch.Tensor, shard: RingShard, step: int, comm: Comm) -> tuple[Pending | None, torch.Tensor]:
    """Send the keys of this step on and start receiving those of the next; nothing after the last step."""
    if step == shard.width - 1:
        return None, kv
    rows = shard.rows[shard.blocks[step + 1].source]
    received = torch.empty((2, rows, *kv.shape[2:]), dtype=kv.dtype, device=kv.device)
    return comm.exchange([(kv, shard.next_rank)], [(received, shard.previous_rank)]), received


def _key_sums(shard: RingShard, step: int, kv: torch.Tensor, filled: bool = True) -> torch.Tensor:
    """A sum for the gradients of the keys of a step (step D: my own again), of zeros or not ``filled``."""
    rows = shard.rows[(shard.index - step) % shard.width]
    make = torch.zeros if filled else torch.empty
    return make((2, rows, *kv.shape[2:]), dtype=accumulation_dtype(kv.dtype), device=kv.device)


def _add_key_gradients(sums: torch.Tensor, grads: tuple[torch.Tensor, ...] | None) -> None:
    if grads is not None:
        _, dk, dv = grads
        sums[0, : dk.shape[0]].add_(dk)
        sums[1, : dv.shape[0]].add_(dv)


def _nothing() -> None:
    return None
