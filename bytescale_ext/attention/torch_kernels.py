"""Attention kernels made of torch's own operators. The contract is in ``kernels.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bytescale_ext.attention.reference import accumulation_dtype, reference_backward, reference_forward
from bytescale_ext.attention.rows import CuSeqlens

Tensors2 = tuple[torch.Tensor, torch.Tensor]
Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

aten = torch.ops.aten


def missing_operator(*names: str) -> Callable[[], str | None]:
    """A function that says which of these operators this torch lacks, or None."""

    def missing() -> str | None:
        absent = [name for name in names if not hasattr(aten, name)]
        return f"this torch has no aten::{absent[0]}" if absent else None

    return missing


# Torch's flash attention on CUDA: one call for all documents, grouped-query heads included.


def cuda_flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: CuSeqlens,
    cu_k: CuSeqlens,
    causal: bool,
    scale: float,
) -> Tensors2:
    """``aten::_flash_attention_forward`` in its varlen form."""
    offsets = (cu_q.on(q.device), cu_k.on(q.device), cu_q.longest, cu_k.longest)
    out, lse, *_ = aten._flash_attention_forward(q, k, v, *offsets, 0.0, causal, False, scale=scale)
    return out, lse


def cuda_flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: CuSeqlens,
    cu_k: CuSeqlens,
    causal: bool,
    scale: float,
) -> Tensors3:
    """``aten::_flash_attention_backward`` in its varlen form; the random state is unused without dropout."""
    offsets = (cu_q.on(q.device), cu_k.on(q.device), cu_q.longest, cu_k.longest)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    dq, dk, dv = aten._flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), *offsets, 0.0, causal, seed, unused, scale=scale
    )
    return dq, dk, dv


# cuDNN: faster on long documents and without a packed form, so several documents go to torch's flash attention.


def cudnn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: CuSeqlens,
    cu_k: CuSeqlens,
    causal: bool,
    scale: float,
) -> Tensors2:
    """cuDNN for one document, torch's flash attention for several (both give the natural log-sum-exp)."""
    if cu_q.num_documents != 1:
        return cuda_flash_forward(q, k, v, cu_q, cu_k, causal, scale)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        _heads_first(q), _heads_first(k), _heads_first(v), None, True, 0.0, causal, False, scale=scale
    )
    return _rows_first(out), lse.reshape(q.shape[1], q.shape[0])


def cudnn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: CuSeqlens,
    cu_k: CuSeqlens,
    causal: bool,
    scale: float,
) -> Tensors3:
    """The backward of ``cudnn_forward``."""
    if cu_q.num_documents != 1:
        return cuda_flash_backward(dout, q, k, v, out, lse, cu_q, cu_k, causal, scale)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        *(_heads_first(x) for x in (dout, q, k, v, out)),
        lse.contiguous().view(1, q.shape[1], q.shape[0], 1),
        seed,
        seed,
        None,
        None,
        None,
        q.shape[0],
        k.shape[0],
        0.0,
        causal,
        scale=scale,
    )
    dq, dk, dv = (_rows_first(grad) for grad in grads)
    return dq, dk, dv


# CPU: one call per document.


def cpu_flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: CuSeqlens,
    cu_k: CuSeqlens,
    causal: bool,
    scale: float,
) -> Tensors2:
    """Torch's flash attention for CPU, document by document."""
    out, lse = _empty_outputs(q)
    for rows, keys in _documents(cu_q, cu_k):
        part, part_lse = aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(q[rows]), _heads_first(k[keys]), _heads_first(v[keys]), 0.0, causal, scale=scale
        )
        out[rows] = _rows_first(part)
        lse[:, rows] = part_lse[0]
    return out, lse


def cpu_flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: CuSeqlens,
    cu_k: CuSeqlens,
    causal: bool,
    scale: float,
) -> Tensors3:
    """The backward of ``cpu_flash_forward``."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in _documents(cu_q, cu_k):
        # The operator reads the log-sum-exp as [heads, rows] with rows outermost in memory.
        part_lse = lse[:, rows].t().contiguous().t().unsqueeze(0)
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_heads_first(x) for x in (dout[rows], q[rows], k[keys], v[keys], out[rows])),
            part_lse,
            0.0,
            causal,
            scale=scale,
        )
        dq[rows], dk[keys], dv[keys] = (_rows_first(part) for part in parts)
    return dq, dk, dv


# The reference, document by document, on any device.


def reference_documents_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: CuSeqlens,
    cu_k: CuSeqlens,
    causal: bool,
    scale: float,
) -> Tensors2:
    """``reference.reference_forward`` of each document."""
    out, lse = _empty_outputs(q)
    for rows, keys in _documents(cu_q, cu_k):
        out[rows], lse[:, rows] = reference_forward(q[rows], k[keys], v[keys], causal, scale)
    return out, lse


def reference_documents_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: CuSeqlens,
    cu_k: CuSeqlens,
    causal: bool,
    scale: float,
) -> Tensors3:
    """``reference.reference_backward`` of each document."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in _documents(cu_q, cu_k):
        dq[rows], dk[keys], dv[keys] = reference_backward(
            dout[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows], causal, scale
        )
    return dq, dk, dv


def _documents(cu_q: CuSeqlens, cu_k: CuSeqlens) -> Iterator[tuple[slice, slice]]:
    """Query rows and key rows of each document that has both."""
    assert cu_q.num_documents == cu_k.num_documents, f"{cu_q=} {cu_k=}"
    for i in range(cu_q.num_documents):
        rows = slice(cu_q.offsets[i], cu_q.offsets[i + 1])
        keys = slice(cu_k.offsets[i], cu_k.offsets[i + 1])
        if rows.stop > rows.start and keys.stop > keys.start:
            yield rows, keys


def _empty_outputs(q: torch.Tensor) -> Tensors2:
    """Zero ``out`` and minus infinite ``lse``: what a query without keys has."""
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)
    return torch.zeros_like(q), lse


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """``[t, heads, dim]`` as a view ``[1, heads, t, dim]``."""
    return x.transpose(0, 1).unsqueeze(0)


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    """``[1, heads, t, dim]`` as a view ``[t, heads, dim]``."""
    return x[0].transpose(0, 1)
