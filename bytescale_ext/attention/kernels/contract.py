"""The contract of attention kernels::

    forward(q, k, v, block)      -> out, lse
    backward(dout, saved, block) -> dq, dk, dv

=============  =============================  =========================================================
tensors        shape                          dtype
=============  =============================  =========================================================
``q, dq``      ``[tq, heads, dim]``           a dtype of the kernel
``k, dk``      ``[tk, kv_heads, dim]``        the same dtype; ``heads`` is a multiple of ``kv_heads``
``v, dv``      ``[tk, kv_heads, value_dim]``  the same dtype
``out, dout``  ``[tq, heads, value_dim]``     the same dtype
``lse``        ``[heads, tq]``                ``accumulation_dtype``; natural log-sum-exp of the scores
=============  =============================  =========================================================

``value_dim`` is ``dim``, except in kernels that take other widths of values (``Kernel.takes``). ``tq`` and ``tk`` are
the last offsets of the block. Tensors may be strided. A query without keys gets ``out`` 0 and ``lse`` minus infinity.

The backward function takes the ``out`` and ``lse`` over *all* keys of the queries, including keys outside of the block
(FlashAttention-2, Algorithm 2: ``delta = rowsum(dout * out)``). So the gradients of all blocks add up to the gradients
of the whole attention. Kernels do not communicate and do not synchronize with the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from bytescale_ext.attention.layouts.blocks import AttentionBlock, PlacedBlock

HALF = (torch.bfloat16, torch.float16)

Output = tuple[torch.Tensor, torch.Tensor]  # out, lse
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # dq, dk, dv


class Saved(NamedTuple):
    """Tensors that a forward pass saves for its backward pass; shapes as in the module docstring."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


ForwardFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBlock], Output]
BackwardFunction = Callable[[torch.Tensor, Saved, AttentionBlock], Gradients]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of log-sum-exp values and of sums over blocks: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_output(q: torch.Tensor, dtype: torch.dtype | None = None, value_dim: int | None = None) -> Output:
    """Return the output of queries without keys, to overwrite or to join blocks to.

    Args:
        q: ``[t, heads, dim]``.
        dtype: dtype of ``out``; by default the dtype of ``q``.
        value_dim: width of one head of the values; by default ``dim``.

    Returns:
        ``out [t, heads, value_dim]`` of zeros and ``lse [heads, t]`` of minus infinity in the accumulation dtype.
    """
    out = torch.zeros((*q.shape[:2], value_dim or q.shape[2]), dtype=dtype or q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)
    return out, lse


def packed_documents(
    block: AttentionBlock | PlacedBlock, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return the arguments of variable-length kernels: offsets and longest documents of queries and keys.

    The offsets are int32 ``[num_documents + 1]`` on ``device``.
    """
    return block.cu_q.on(device), block.cu_k.on(device), block.cu_q.longest, block.cu_k.longest
