"""Attention sinks: one additional score per head, which takes part in the softmax and has a value of zero.

With a sink ``b`` the weights of a query's keys are ``exp(s_j) / (exp(b) + sum_i exp(s_i))``. The sink is therefore
joined once to the finished attention over all keys, like a block of keys with values of zero (``merge.py``)::

    lse' = log(exp(lse) + exp(b))        out' = exp(lse - lse') out

Kernels compute gradients from ``out'`` and ``lse'``, as they do if further keys exist outside their block. The gradient
of the sink is the gradient of a score with a value of zero: ``-sum over queries of exp(b - lse') (dout . out')``. ``b``
is 0 ("off by one", Miller 2023) or learned per head (gpt-oss, Megatron's ``--softmax-type``).
"""

from __future__ import annotations

import torch

from bytescale_ext.attention.kernels.contract import accumulation_dtype


def add_sink_(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> None:
    """Join a sink to finished attention, in place. Queries without keys keep ``out`` 0.

    Args:
        out: ``[t, heads, dim]``.
        lse: ``[heads, t]``, in the accumulation dtype.
        sink: ``[heads]``, of any floating dtype.
    """
    merged = torch.logaddexp(lse, sink.to(lse.dtype).unsqueeze(1))
    out.mul_(torch.exp(lse - merged).t().unsqueeze(-1))
    lse.copy_(merged)


def sink_gradient(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the gradient of a sink ``[heads]``, or None without a sink.

    ``dout, out``: ``[t, heads, dim]``; ``lse``: ``[heads, t]``. ``out`` and ``lse`` are the results of ``add_sink_``.
    """
    if sink is None:
        return None
    precise = accumulation_dtype(out.dtype)
    delta = (dout.to(precise) * out.to(precise)).sum(-1)
    weights = torch.exp(sink.to(precise).unsqueeze(1) - lse)
    return -(weights * delta.t()).sum(1).to(sink.dtype)
