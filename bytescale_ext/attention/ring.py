"""Ring attention over any number of ranks, for all sequences of a micro-batch at once.

The sequences that share a ring of D ranks form one pass. Their keys and values travel together from each member to the
next. Every member computes one block per hop, while the keys of the next hop are in transit. Hop 0 has its own keys::

    hop            0              1              2
    compute        own triangles  keys of 1st    keys of 2nd      predecessor on the route
    in transit     keys of 1st    keys of 2nd    -

Blocks are joined by their log-sum-exp (``merge.py``). In the backward pass the keys travel again, and the sums of their
gradients follow one hop behind. A final exchange returns the sums to the owners of the keys. Rings over several nodes
may be hierarchical: keys and sums travel inside nodes and between nodes at the same time (``layouts/route.py``,
``travel.py``).

If keys are kept from slice to slice (``KeptKeys``), a slice sends only its own keys in the forward pass and only
gradients in the backward pass. Ranks that keep sums of gradients send the sums of the slice's own keys, which include
the gradients from later slices. Ranks that keep no sums send the gradients of all keys up to the end of the slice.

``layouts/layout.py`` has the geometry of the blocks. Sequences that a window limits have separate passes, which run
first (``window.py``). Sources: ByteScale sections 5.1 and 7; Liu et al., "Ring Attention".

The algorithm is a generator that yields each exchange at the point where it must be complete. ``drive`` waits for
exchanges between processes. ``virtual.run_in_turn`` runs several ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bytescale_ext.attention.backend import Backend, Exchanges, PendingGradients
from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved, accumulation_dtype, empty_output
from bytescale_ext.attention.layouts.blocks import PlacedBlock
from bytescale_ext.attention.layouts.layout import AttentionLayout, RingPass
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.layouts.window import WindowPass
from bytescale_ext.attention.sink import add_sink_, sink_gradient
from bytescale_ext.attention.travel import ForwardResult, Keys, TravellingKeys, TravellingSums, add_kept, key_sums
from bytescale_ext.attention.window import window_backward, window_forward
from bytescale_ext.parallel.p2p import Pending


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: AttentionLayout, backend: Backend
) -> torch.Tensor:
    """Return the causal attention of all sequences of a micro-batch, differentiable once.

    Communicates on the ring group. All members of a ring must call this function for their common micro-batches in the
    same order, also in a recomputation. Either all members run the backward pass or none does.

    Args:
        q: queries, ``[t, heads, dim]``; ``t == layout.num_rows``.
        k, v: keys and values, ``[t, kv_heads, dim]``, in the dtype of ``q``; ``heads`` is a multiple of ``kv_heads``.
            Heads of values may have another width if the layout has no passes. Or halves (``latent.py``), which the
            backend expands.
        layout: attention layout of this rank. The layouts of all members of a ring must come from the same plan.
        backend: kernel and communication.

    Returns:
        ``[t, heads, value_dim]`` in the dtype of ``q``. Padding rows and their gradients are zero.

    Raises:
        ValueError: the shapes or dtypes of the tensors do not fit the layout or each other.
        PeerLost: the connection to a peer is lost.
    """
    backend.check(q, k, v, layout.num_rows, travels=bool(layout.all_passes))
    settings = (layout, backend)
    out: torch.Tensor = RingAttention.apply(  # type: ignore[no-untyped-call]  # torch's, without annotations
        q, k, v, settings, *backend.weights
    )
    return out


class _RingCtx(torch.autograd.function.FunctionCtx):
    saved_tensors: tuple[torch.Tensor, ...]
    settings: tuple[AttentionLayout, Backend]


class RingAttention(torch.autograd.Function):
    """Autograd function of a whole micro-batch. Saves q, k, v, out and lse, but no keys of other ranks."""

    @staticmethod
    def forward(
        ctx: _RingCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        settings: tuple[AttentionLayout, Backend],
        *weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return ``out [t, heads, dim]``; shapes as in ``ring_attention``; ``weights``: ``Backend.weights``."""
        out, lse = drive(attention_forward(q, k, v, *settings))
        if weights[0] is not None:
            add_sink_(out, lse, weights[0])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _RingCtx, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of ``q, k, v`` and the weights, of their shapes; ``dout``: ``[t, heads, dim]``."""
        saved, layout, backend = Saved(*ctx.saved_tensors), ctx.settings[0], ctx.settings[1].for_backward()
        grads = drive(attention_backward(dout.contiguous(), saved, layout, backend))
        dsink = sink_gradient(dout, saved.out, saved.lse, backend.sink)
        return *grads, None, dsink, backend.expansion_gradient()


def drive[Result](exchanges: Exchanges[Result]) -> Result:
    """Run the algorithm between processes: wait for each exchange that it yields, and return its result."""
    while True:
        try:
            pending = next(exchanges)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        pending.wait()


def attention_forward(
    q: torch.Tensor, k: Keys, v: Keys, layout: AttentionLayout, backend: Backend
) -> Exchanges[Output]:
    """Run the forward pass: ``out [t, heads, dim]`` and ``lse [heads, t]`` (minus infinity on padding rows).

    Yields the exchanges with the other members of the rings, in an order that all members share. Passes run in the
    order of the layout. Local documents are computed while the first keys are in transit.

    Args:
        q: queries of the micro-batch or slice, ``[t, heads, dim]``.
        k, v: keys and values of the micro-batch, ``[tk, kv_heads, dim]``. For a slice, this rank's own rows up to the
            end of the slice are given, and this function fills the kept rows of other members.
    """
    if not layout.all_passes:
        totals: Output | None = None
        for block in layout.local_blocks:
            totals = _joined(totals, q, (k, v), block, backend, q.dtype)
        return totals or empty_output(q, value_dim=backend.value_dim(v))
    if (ring_pass := layout.whole_pass) is not None:
        out, lse = yield from _forward_pass(q, k, v, ring_pass, backend, _compute_nothing)
        return out.to(q.dtype), lse
    out, lse = empty_output(q, value_dim=backend.value_dim(v))

    def compute_local() -> None:
        for block in layout.local_blocks:
            _compute_block((out, lse), q, k, v, block, backend)

    for number, layout_pass in enumerate(layout.all_passes):
        rows = layout_pass.in_micro_batch
        meanwhile = compute_local if number == 0 else _compute_nothing
        if isinstance(layout_pass, WindowPass):
            exchanges = window_forward(rows.take(q), k, v, layout_pass, backend, meanwhile)
        else:
            exchanges = _forward_pass(rows.take(q), k, v, layout_pass, backend, meanwhile)
        pass_out, pass_lse = yield from exchanges
        rows.put_(out, pass_out)
        rows.put_(lse, pass_lse, dim=1)
    return out, lse


def _compute_nothing() -> None:
    """Compute nothing while keys are in transit."""


def _forward_pass(
    q: torch.Tensor,
    k: Keys,
    v: Keys,
    ring_pass: RingPass,
    backend: Backend,
    meanwhile: Callable[[], None],
) -> Exchanges[Output]:
    """Run one pass: ``out [rows, heads, dim]`` and ``lse [heads, rows]`` of its queries, in the accumulation dtype.

    Args:
        q: queries of the pass, ``[rows, heads, dim]``.
        k, v: keys and values of the micro-batch, ``[tk, kv_heads, dim]``.
        meanwhile: function to call while the first keys are in transit.
    """
    totals: Output | None = None
    travelling = TravellingKeys(k, v, ring_pass, backend.exchange)
    for hop in range(ring_pass.width):
        # Posted before the block is computed, so that the transfer overlaps with computation.
        arriving = travelling.post(hop)
        keys, values = travelling.here(hop)
        if hop == 0:
            meanwhile()
        for block in ring_pass.at(hop):
            totals = _joined(totals, q, (keys, values), block, backend, accumulation_dtype(q.dtype))
        if arriving is not None:
            yield arriving
            travelling.arrive(hop + 1)
    return totals or empty_output(q, accumulation_dtype(q.dtype), backend.value_dim(v))


def _joined(
    totals: Output | None,
    q: torch.Tensor,
    keys: tuple[Keys, Keys],
    block: PlacedBlock,
    backend: Backend,
    dtype: torch.dtype,
) -> Output:
    """Return the totals with a block; None before the first block. A first block of all rows is the totals.

    ``keys``: keys and values, ``[tk, kv_heads, dim]`` each; ``dtype``: dtype of the total ``out``; other arguments as
    in ``_compute_block``.
    """
    if totals is None and block.causal and block.queries.num_rows == len(q):
        out, lse = backend.forward(q, *keys, block)
        return out.to(dtype).contiguous(), lse.contiguous()
    totals = totals or empty_output(q, dtype, backend.value_dim(keys[1]))
    _compute_block(totals, q, *keys, block, backend)
    return totals


def _compute_block(totals: Output, q: torch.Tensor, k: Keys, v: Keys, block: PlacedBlock, backend: Backend) -> None:
    """Compute a block and join it to the totals. Causal blocks come first and overwrite the totals.

    ``totals``: ``out [rows, heads, dim]`` and ``lse [heads, rows]``; other shapes as in ``Backend.forward``.
    """
    out, lse = totals
    rows, block_output = block.queries, backend.forward(q, k, v, block)
    if block.causal:
        rows.put_(out, block_output[0])
        rows.put_(lse, block_output[1], dim=1)
        return
    backend.kernel.join(totals, block_output, rows)


def attention_backward(
    dout: torch.Tensor, saved: Saved, layout: AttentionLayout, backend: Backend
) -> Exchanges[Gradients]:
    """Run the backward pass of a micro-batch: ``dq [t, heads, dim]`` and ``dk, dv [t, kv_heads, dim]``.

    ``dout``: ``[t, heads, dim]``; ``saved``: inputs and outputs of ``attention_forward``.
    """
    if (block := layout.whole_block) is not None and block.keys == block.queries:
        return backend.backward(dout, ForwardResult(*saved), block)
    if (ring_pass := layout.whole_pass) is not None and ring_pass.keys == ring_pass.in_micro_batch:
        nothing = (saved.k, saved.v)  # the sums of kept keys, which only slices have
        dq, gradients = yield from _backward_pass(dout, ForwardResult(*saved), nothing, ring_pass, backend)
        yield gradients.pending
        dk, dv = gradients.total().to(saved.k.dtype).unbind()
        return dq.to(saved.q.dtype), dk, dv
    dk, dv = torch.zeros_like(saved.k), torch.zeros_like(saved.v)
    dq = yield from attention_backward_into(dout, ForwardResult(*saved), (dk, dv), layout, backend)
    return dq, dk, dv


def attention_backward_into(
    dout: torch.Tensor,
    computed: ForwardResult,
    sums: tuple[Keys, Keys],
    layout: AttentionLayout,
    backend: Backend,
) -> Exchanges[torch.Tensor]:
    """Run the backward pass of a micro-batch or slice: ``dq [t, heads, dim]``. Key gradients are added to ``sums``.

    Yields exchanges like ``attention_forward``, with the passes in the same order. Local documents are computed last,
    while the gradients of this rank's keys are in transit.

    Args:
        dout: gradient of ``out``, ``[t, heads, dim]``.
        computed: inputs and outputs of ``attention_forward``.
        sums: sums of the gradients of keys and of values, each ``[tk, kv_heads, dim]``.
        layout: attention layout of this rank.
        backend: kernel and communication.
    """
    q, k, v, out, lse = computed
    dk, dv = sums
    if not layout.all_passes:
        return _local_backward(dout, computed, sums, None, layout, backend)
    dq = torch.zeros_like(q)
    pending_gradients: list[PendingGradients] = []
    for layout_pass in layout.all_passes:
        rows = layout_pass.in_micro_batch
        pass_computed = ForwardResult(rows.take(q), k, v, rows.take(out), rows.take(lse, dim=1))
        if isinstance(layout_pass, WindowPass):
            exchanges = window_backward(rows.take(dout), pass_computed, layout_pass, backend)
        else:
            exchanges = _backward_pass(rows.take(dout), pass_computed, (dk, dv), layout_pass, backend)
        pass_dq, gradients = yield from exchanges
        rows.put_(dq, pass_dq)
        pending_gradients.append(gradients)
    dq = _local_backward(dout, computed, sums, dq, layout, backend)
    for gradients in pending_gradients:
        yield gradients.pending
        total = gradients.total()
        gradients.keys.add_(dk, total[0])
        gradients.keys.add_(dv, total[1])
    return dq


def _local_backward(
    dout: torch.Tensor,
    computed: ForwardResult,
    sums: tuple[Keys, Keys],
    dq: torch.Tensor | None,
    layout: AttentionLayout,
    backend: Backend,
) -> torch.Tensor:
    """Return the gradients ``[t, heads, dim]`` of all queries, after the local documents.

    ``dq``: gradients of the queries of all passes, ``[t, heads, dim]``; None without passes. Others as in
    ``attention_backward_into``.
    """
    dk, dv = sums
    for block in layout.local_blocks:
        grads = backend.backward(dout, computed, block)
        dq = _with_queries(dq, grads[0], block.queries, computed.q, computed.q.dtype)
        block.keys.add_(dk, grads[1])
        block.keys.add_(dv, grads[2])
    return torch.zeros_like(computed.q) if dq is None else dq


def _backward_pass(
    dout: torch.Tensor,
    saved: ForwardResult,
    totals: tuple[Keys, Keys],
    ring_pass: RingPass,
    backend: Backend,
) -> Exchanges[tuple[torch.Tensor, PendingGradients]]:
    """Run one pass: ``dq [rows, heads, dim]`` of its queries, and the pending gradients of this rank's keys.

    Sums of gradients are ``[2, rows, kv_heads, dim]`` (keys, values) in the accumulation dtype. ``TravellingSums``
    returns them to the owners of the keys. The sum of a hop is posted after the keys of the hop.

    Args:
        dout: gradient of the pass's output, ``[rows, heads, dim]``.
        saved: queries and outputs of the pass; keys and values ``[tk, kv_heads, dim]`` of the micro-batch.
        totals: sums of the micro-batch for keys and for values, ``[tk, kv_heads, dim]`` each. This rank's gradients of
            kept keys are added to them, except the gradients that travel.
    """
    k, kept = saved.k, ring_pass.kept_sums
    dq: torch.Tensor | None = None
    travelling_keys = TravellingKeys(k, saved.v, ring_pass, backend.exchange)
    travelling_sums = TravellingSums(k, ring_pass, backend.exchange)
    own: list[torch.Tensor] = []
    arriving_sums: Pending | None = None
    for hop in range(ring_pass.width):
        arriving = travelling_keys.post(hop) if ring_pass.kept is None else None
        keys, values = travelling_keys.here(hop)
        hop_saved = saved._replace(k=keys, v=values)
        computed = [(block, backend.backward(dout, hop_saved, block)) for block in ring_pass.at(hop)]
        for block, grads in computed:
            dq = _with_queries(dq, grads[0], block.queries, saved.q, accumulation_dtype(saved.q.dtype))
        if arriving_sums is not None:
            yield arriving_sums
        travelling = travelling_sums.here(hop) if hop else None
        total = key_sums(len(keys), k) if travelling is None or kept is not None else travelling
        total_k, total_v = total.unbind()
        for block, grads in computed:
            block.keys.add_(total_k, grads[1])
            block.keys.add_(total_v, grads[2])
        if kept is not None:
            source = ring_pass.source(hop)
            add_kept(totals, total, travelling, kept.whole[source], kept.own[source])
        elif hop == 0:
            own.append(total)
        arriving_sums = travelling_sums.post(hop)
        if arriving is not None:
            yield arriving
            travelling_keys.arrive(hop + 1)
    assert arriving_sums is not None, f"{ring_pass=}"
    if ring_pass.route.inner_rings > 1:
        yield arriving_sums
        arriving_sums = travelling_sums.post_home()
    if dq is None:  # a member without tokens
        dq = torch.zeros(saved.q.shape, dtype=accumulation_dtype(saved.q.dtype), device=saved.q.device)
    return dq, PendingGradients(ring_pass.summed_keys, arriving_sums, partial(_sum, [*travelling_sums.home, *own]))


def _with_queries(
    total: torch.Tensor | None, part: torch.Tensor, rows: Rows, q: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Add a block's gradients ``[rows.num_rows, heads, dim]`` to the running gradients of ``q [rows, heads, dim]``.

    Returns the running gradients in ``dtype``; ``total`` is None before the first block.
    """
    if total is None:
        if rows.num_rows == len(q):
            return part.to(dtype)
        total = torch.zeros(q.shape, dtype=dtype, device=q.device)
    rows.add_(total, part)
    return total


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of parts ``[2, rows, kv_heads, dim]``, computed in place in the first part."""
    total, *others = parts
    for part in others:
        total.add_(part)
    return total
