"""Ring attention over any number of ranks, for all sequences of a micro-batch at once.

Sequences that share a ring of D ranks make one pass. Their keys and values travel together from each member to the
next, D-1 times, and every member computes one block per step while the next keys are on their way::

    step           0              1              2
    compute        own triangles  keys of 1st    keys of 2nd      member before me on the route
    on the way     keys of 1st    keys of 2nd    -

Blocks are joined by their log-sum-exp (``merge.py``). In the backward pass the keys travel again, and the sums of
their gradients travel one step behind them; after the last step the sums need one more hop to reach their owner. Rings
over several nodes may be hierarchical: keys and sums travel inside a node and between nodes at once
(``layouts/route.py``, ``travel.py``). Where
keys are kept from slice to slice (``KeptKeys``), a slice sends only its own keys in the forward pass, and only
gradients in the backward pass. Ranks that keep sums of gradients send those of the slice's own keys, which include the
gradients from later slices. Ranks that keep no sums send the gradients of all keys up to the end of the slice.
``layouts/layout.py`` has the geometry of blocks. Sequences that a window limits have passes of their own, which run
first (``window.py``). Sources: ByteScale sections 5.1 and 7; Liu et al., "Ring Attention".

The algorithm is a generator that yields each exchange at the point where it must be complete. ``drive`` waits for it
between processes; ``virtual.run_in_turn`` runs several ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bytescale_ext.attention.backend import Backend, Returning, Steps
from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved, accumulation_dtype, empty_output
from bytescale_ext.attention.layouts.blocks import PlacedBlock
from bytescale_ext.attention.layouts.layout import AttentionLayout, RingPass
from bytescale_ext.attention.layouts.window import WindowPass
from bytescale_ext.attention.sink import add_sink_, sink_gradient
from bytescale_ext.attention.travel import Computed, Keys, TravellingKeys, TravellingSums, add_kept, key_sums
from bytescale_ext.attention.window import window_backward, window_forward
from bytescale_ext.parallel.p2p import Pending


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: AttentionLayout, backend: Backend
) -> torch.Tensor:
    """Return the causal attention of every sequence of a micro-batch, differentiable once.

    Communicates on the ring group. Every member of a ring must call this function for the micro-batches that share a
    sequence in the same order (also in a recomputation), and either all of them run the backward pass or none does.

    Args:
        q: ``[t, heads, dim]``, ``t == layout.num_rows``.
        k, v: ``[t, kv_heads, dim]``, the dtype of ``q``; ``heads`` is a multiple of ``kv_heads``. Or halves of latents
            (``latent.py``), which the backend expands.
        layout: the rows of this rank; all members of a ring must hold layouts of the same plan.
        backend: how to compute and exchange.

    Returns:
        ``[t, heads, dim]`` in the dtype of ``q``. Padding rows are zero, as are their gradients.

    Raises:
        ValueError: the tensors do not fit the layout or each other.
        RuntimeError: from the communication backend when a peer has died.
    """
    backend.check(q, k, v, layout.num_rows)
    settings = (layout, backend)
    out: torch.Tensor = RingAttention.apply(  # type: ignore[no-untyped-call]  # torch's, without annotations
        q, k, v, settings, *backend.weights
    )
    return out


class _RingCtx(torch.autograd.function.FunctionCtx):
    saved_tensors: tuple[torch.Tensor, ...]
    settings: tuple[AttentionLayout, Backend]


class RingAttention(torch.autograd.Function):
    """One node for the whole micro-batch; saves q, k, v, out and lse, and no keys of other ranks."""

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
        out, lse = drive(forward_steps(q, k, v, *settings))
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
        grads = drive(backward_steps(dout.contiguous(), saved, layout, backend))
        of_sink = sink_gradient(dout, saved.out, saved.lse, backend.sink)
        return *grads, None, of_sink, backend.expansion_gradient()


def drive[Result](steps: Steps[Result]) -> Result:
    """Run the algorithm between processes: wait for each exchange that it yields, and return its result."""
    while True:
        try:
            pending = next(steps)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        pending.wait()


def forward_steps(q: torch.Tensor, k: Keys, v: Keys, layout: AttentionLayout, backend: Backend) -> Steps[Output]:
    """Run the forward pass: ``out [t, heads, dim]`` and ``lse [heads, t]`` (minus infinity on padding rows).

    Yields the exchanges with the members of its rings; ``ring_attention`` says what all members must do in the same
    order. Passes run in the order of the layout. Local documents are computed while the first keys are on their way.

    Args:
        q: ``[t, heads, dim]``, of the micro-batch or of the slice.
        k, v: ``[tk, kv_heads, dim]``, of the micro-batch. For a slice, this rank's own rows are filled up to the end
            of the slice; kept rows of other members are filled here.
    """
    out, lse = empty_output(q)

    def compute_local() -> None:
        for block in layout.local_blocks:
            _compute_block((out, lse), q, k, v, block, backend)

    for number, one in enumerate(layout.all_passes):
        mine = one.in_micro_batch
        meanwhile = compute_local if number == 0 else _nothing
        if isinstance(one, WindowPass):
            steps = window_forward(mine.take(q), k, v, one, backend, meanwhile)
        else:
            steps = _forward_pass(mine.take(q), k, v, one, backend, meanwhile)
        part, part_lse = yield from steps
        mine.put_(out, part)
        mine.put_(lse, part_lse, dim=1)
    if not layout.all_passes:
        compute_local()
    return out, lse


def _nothing() -> None:
    """Compute nothing while keys are on their way."""


def _forward_pass(
    q: torch.Tensor,
    k: Keys,
    v: Keys,
    ring_pass: RingPass,
    backend: Backend,
    meanwhile: Callable[[], None],
) -> Steps[Output]:
    """Run one pass: ``out [rows, heads, dim]`` and ``lse [heads, rows]`` of my rows, in the accumulation dtype.

    Args:
        q: ``[rows, heads, dim]``, of these rows.
        k, v: ``[tk, kv_heads, dim]``, of the micro-batch.
        meanwhile: called while the first keys are on their way.
    """
    totals = empty_output(q, accumulation_dtype(q.dtype))
    travelling = TravellingKeys(k, v, ring_pass, backend.exchange)
    for step in range(ring_pass.width):
        # Posted before the block is computed, so that the transfer hides behind it.
        arriving = travelling.post(step)
        keys, values = travelling.here(step)
        if step == 0:
            meanwhile()
        for block in ring_pass.at(step):
            _compute_block(totals, q, keys, values, block, backend)
        if arriving is not None:
            yield arriving
            travelling.arrive(step + 1)
    return totals


def _compute_block(totals: Output, q: torch.Tensor, k: Keys, v: Keys, block: PlacedBlock, backend: Backend) -> None:
    """Compute a block and join it to the totals. Causal blocks come first and overwrite.

    ``totals``: ``out [rows, heads, dim]`` and ``lse [heads, rows]``; other shapes as in ``Backend.forward``.
    """
    out, lse = totals
    rows, part = block.queries, backend.forward(q, k, v, block)
    if block.causal:
        rows.put_(out, part[0])
        rows.put_(lse, part[1], dim=1)
        return
    backend.kernel.join(totals, part, rows)


def backward_steps(dout: torch.Tensor, saved: Saved, layout: AttentionLayout, backend: Backend) -> Steps[Gradients]:
    """Run the backward pass of a micro-batch: ``dq [t, heads, dim]`` and ``dk, dv [t, kv_heads, dim]``.

    ``dout``: ``[t, heads, dim]``; ``saved``: inputs and outputs of ``forward_steps``.
    """
    dk, dv = torch.zeros_like(saved.k), torch.zeros_like(saved.v)
    dq = yield from summing_steps(dout, Computed(*saved), (dk, dv), layout, backend)
    return dq, dk, dv


def summing_steps(
    dout: torch.Tensor,
    computed: Computed,
    sums: tuple[Keys, Keys],
    layout: AttentionLayout,
    backend: Backend,
) -> Steps[torch.Tensor]:
    """Run the backward pass of a micro-batch or slice: ``dq [t, heads, dim]``; key gradients are added to ``sums``.

    Yields exchanges like ``forward_steps``, with the passes in the same order. Local documents come last, while the
    gradients of my keys are on their way home. ``dout``: ``[t, heads, dim]``; ``sums``: of keys and of values, each
    ``[tk, kv_heads, dim]``.
    """
    q, k, v, out, lse = computed
    dq = torch.zeros_like(q)
    dk, dv = sums
    returning: list[Returning] = []
    for one in layout.all_passes:
        mine = one.in_micro_batch
        of_pass = Computed(mine.take(q), k, v, mine.take(out), mine.take(lse, dim=1))
        if isinstance(one, WindowPass):
            steps = window_backward(mine.take(dout), of_pass, one, backend)
        else:
            steps = _backward_pass(mine.take(dout), of_pass, (dk, dv), one, backend)
        part, part_returning = yield from steps
        mine.put_(dq, part)
        returning.append(part_returning)
    for block in layout.local_blocks:
        grads = backend.backward(dout, computed, block)
        if block.causal:
            block.queries.put_(dq, grads[0])
        else:
            block.queries.add_(dq, grads[0])
        block.keys.add_(dk, grads[1])
        block.keys.add_(dv, grads[2])
    for home in returning:
        yield home.pending
        total = home.total()
        home.keys.add_(dk, total[0])
        home.keys.add_(dv, total[1])
    return dq


def _backward_pass(
    dout: torch.Tensor,
    saved: Computed,
    totals: tuple[Keys, Keys],
    ring_pass: RingPass,
    backend: Backend,
) -> Steps[tuple[torch.Tensor, Returning]]:
    """Run one pass: ``dq [rows, heads, dim]`` of my rows, and the gradients of my keys, on their way.

    Sums of gradients are ``[2, rows, kv_heads, dim]`` (keys, values) in the accumulation dtype. ``TravellingSums`` says
    how they come home; each is posted after the keys of its step.

    Args:
        dout: ``[rows, heads, dim]``, of my rows.
        saved: of my rows; keys and values ``[tk, kv_heads, dim]`` of the micro-batch.
        totals: sums of the micro-batch for keys and values, ``[tk, kv_heads, dim]`` each. My part of the gradients of
            kept keys is added to them, unless it travels.
    """
    k, kept = saved.k, ring_pass.kept_sums
    dq = torch.zeros(saved.q.shape, dtype=accumulation_dtype(saved.q.dtype), device=saved.q.device)
    keys_on_way = TravellingKeys(k, saved.v, ring_pass, backend.exchange)
    sums_on_way = TravellingSums(k, ring_pass, backend.exchange)
    own: list[torch.Tensor] = []
    arriving_sums: Pending | None = None
    for step in range(ring_pass.width):
        arriving = keys_on_way.post(step) if ring_pass.kept is None else None
        keys, values = keys_on_way.here(step)
        here = saved._replace(k=keys, v=values)
        computed = [(block, backend.backward(dout, here, block)) for block in ring_pass.at(step)]
        for block, grads in computed:
            block.queries.add_(dq, grads[0])
        if arriving_sums is not None:
            yield arriving_sums
        travelling = sums_on_way.here(step) if step else None
        total = key_sums(len(keys), k) if travelling is None or kept is not None else travelling
        for block, grads in computed:
            block.keys.add_(total[0], grads[1])
            block.keys.add_(total[1], grads[2])
        if kept is not None:
            source = ring_pass.source(step)
            add_kept(totals, total, travelling, kept.whole[source], kept.own[source])
        elif step == 0:
            own.append(total)
        arriving_sums = sums_on_way.post(step)
        if arriving is not None:
            yield arriving
            keys_on_way.arrive(step + 1)
    assert arriving_sums is not None, f"{ring_pass=}"
    if ring_pass.route.inner_rings > 1:
        yield arriving_sums
        arriving_sums = sums_on_way.post_home()
    return dq, Returning(ring_pass.summed_keys, arriving_sums, partial(_sum, [*sums_on_way.home, *own]))


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of parts ``[2, rows, kv_heads, dim]``, in the first one."""
    total, *others = parts
    for part in others:
        total.add_(part)
    return total
