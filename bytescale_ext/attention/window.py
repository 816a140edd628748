"""Attention of sequences that a window limits, on the ranks of a ring: one exchange of keys, one of gradients.

For each of its runs of tokens, a member fetches the keys of the window before the run into its pool
(``layouts/window.py``). It computes its queries against the pool, without joining blocks. In the backward pass keys are
fetched again, and the gradients of the pool go back to the members that own the keys.

Messages are ``[2, rows, kv_heads, dim]``: keys, then values. The functions are generators, as in ``ring.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bytescale_ext.attention.backend import Backend, Exchanges, PendingGradients
from bytescale_ext.attention.kernels.contract import Output, empty_output
from bytescale_ext.attention.layouts.window import WindowPass
from bytescale_ext.attention.travel import ForwardResult, Keys, key_sums, like


def window_forward(
    q: torch.Tensor, k: Keys, v: Keys, window_pass: WindowPass, backend: Backend, meanwhile: Callable[[], None]
) -> Exchanges[Output]:
    """Run one pass: ``out [rows, heads, dim]`` and ``lse [heads, rows]`` of its queries.

    Args:
        q: queries of the pass, ``[rows, heads, dim]``.
        k, v: keys and values of the micro-batch, ``[tk, kv_heads, dim]``.
        window_pass: rows and blocks of the pass.
        backend: kernel and communication.
        meanwhile: function to call while the keys are in transit.
    """
    keys, values = yield from _pool(k, v, window_pass, backend, meanwhile)
    out, lse = empty_output(q, value_dim=backend.value_dim(v))
    for block in window_pass.blocks:
        block_out, block_lse = backend.forward(q, keys, values, block)
        block.queries.put_(out, block_out)
        block.queries.put_(lse, block_lse, dim=1)
    return out, lse


def window_backward(
    dout: torch.Tensor, saved: ForwardResult, window_pass: WindowPass, backend: Backend
) -> Exchanges[tuple[torch.Tensor, PendingGradients]]:
    """Run one pass: ``dq [rows, heads, dim]`` of its queries, and the pending gradients of this rank's keys.

    Args:
        dout: gradient of the pass's output, ``[rows, heads, dim]``.
        saved: queries and outputs of the pass; keys and values ``[tk, kv_heads, dim]`` of the micro-batch.
        window_pass: rows and blocks of the pass.
        backend: kernel and communication.
    """
    keys, values = yield from _pool(saved.k, saved.v, window_pass, backend)
    pool_saved = saved._replace(k=keys, v=values)
    dq, sums = torch.zeros_like(saved.q), key_sums(window_pass.num_keys, keys)
    for block in window_pass.blocks:
        grads = backend.backward(dout, pool_saved, block)
        block.queries.put_(dq, grads[0])
        block.keys.add_(sums[0], grads[1])
        block.keys.add_(sums[1], grads[2])
    leaving = [(rows.take(sums, dim=1).contiguous(), rank) for rank, rows in window_pass.receives]
    arriving = [(key_sums(rows.num_rows, keys, filled=False), rank) for rank, rows in window_pass.sends]
    pending = backend.exchange(leaving, arriving)

    def total() -> torch.Tensor:
        total_sums = key_sums(window_pass.keys.num_rows, keys)
        in_sent, in_pool = window_pass.own
        in_sent.put_(total_sums, in_pool.take(sums, dim=1), dim=1)
        for (received, _), (_, rows) in zip(arriving, window_pass.sends, strict=True):
            rows.add_(total_sums, received, dim=1)
        return total_sums

    return dq, PendingGradients(window_pass.keys, pending, total)


def _pool(
    k: Keys, v: Keys, window_pass: WindowPass, backend: Backend, meanwhile: Callable[[], None] = lambda: None
) -> Exchanges[torch.Tensor]:
    """Fetch the keys and values of the pool, ``[2, num_keys, kv_heads, dim]``. Arguments as in ``window_forward``."""
    sent = torch.stack([window_pass.keys.take(tensor) for tensor in (k, v)])
    pool = sent.new_empty((2, window_pass.num_keys, *like(k).shape[1:]))
    leaving = [(rows.take(sent, dim=1).contiguous(), rank) for rank, rows in window_pass.sends]
    arriving = [(sent.new_empty((2, rows.num_rows, *sent.shape[2:])), rank) for rank, rows in window_pass.receives]
    pending = backend.exchange(leaving, arriving)
    meanwhile()
    in_sent, in_pool = window_pass.own
    in_pool.put_(pool, in_sent.take(sent, dim=1), dim=1)
    yield pending
    for (received, _), (_, rows) in zip(arriving, window_pass.receives, strict=True):
        rows.put_(pool, received, dim=1)
    return pool
