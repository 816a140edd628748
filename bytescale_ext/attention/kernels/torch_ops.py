"""Attention kernels made of torch's own operators. ``contract.py`` has the shapes and dtypes of all functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bytescale_ext.attention.kernels.contract import (
    Gradients,
    Output,
    Saved,
    accumulation_dtype,
    empty_output,
    packed_documents,
)
from bytescale_ext.attention.layouts.blocks import AttentionBlock

aten = torch.ops.aten


def missing_operator(*names: str) -> Callable[[], str | None]:
    """Return a function that names the first of these operators that this torch lacks, or returns None."""

    def missing() -> str | None:
        absent = [name for name in names if not hasattr(aten, name)]
        return f"this torch has no aten::{absent[0]}" if absent else None

    return missing


def missing_where_deterministic(missing: Callable[[], str | None]) -> Callable[[], str | None]:
    """Return ``missing`` for a kernel with a nondeterministic backward pass, which ``--deterministic-mode`` forbids."""
    reason = "its backward pass is not deterministic"
    return lambda: reason if torch.are_deterministic_algorithms_enabled() else missing()


# Torch's flash attention on CUDA: one call for all documents, with grouped-query heads.


def cuda_flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
    """Call ``aten::_flash_attention_forward`` in its varlen form: ``out [tq, heads, dim]``, ``lse [heads, tq]``."""
    out, lse, *_ = aten._flash_attention_forward(
        q,
        k,
        v,
        *packed_documents(block, q.device),
        0.0,
        block.causal,
        False,
        scale=block.scale,
        **_window(block),
    )
    return out, lse


def cuda_flash_backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
    """Call ``aten::_flash_attention_backward`` in its varlen form: ``dq, dk, dv`` of the shapes of ``q, k, v``."""
    q, k, v, out, lse = saved
    # The random state of dropout is unused.
    seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    dq, dk, dv = aten._flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), *packed_documents(block, q.device), 0.0, block.causal,
        seed, unused, scale=block.scale, **_window(block),
    )  # fmt: skip
    return dq, dk, dv


def _window(block: AttentionBlock) -> dict[str, int]:
    """Return the arguments of a window, none for a block without a window."""
    return {} if block.window is None else {"window_size_left": block.window, "window_size_right": 0}


# cuDNN: faster on long documents, but without support for packed documents. Several documents and windows go to torch's
# flash attention.


def cudnn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
    """Return ``out [tq, heads, dim]`` and ``lse [heads, tq]``: by cuDNN for one document, else by flash attention.

    Both return the natural log-sum-exp.
    """
    if block.num_documents != 1 or block.window is not None:
        return cuda_flash_forward(q, k, v, block)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *map(_heads_first, (q, k, v)), None, True, 0.0, block.causal, False, scale=block.scale
    )
    return _rows_first(out), lse.reshape(q.shape[1], q.shape[0])


def cudnn_backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
    """Return the gradients of ``cudnn_forward``: ``dq, dk, dv`` of the shapes of ``q, k, v``."""
    if block.num_documents != 1 or block.window is not None:
        return cuda_flash_backward(dout, saved, block)
    q, k, v, out, lse = saved
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        *map(_heads_first, (dout, q, k, v, out)),
        lse.contiguous().view(1, q.shape[1], q.shape[0], 1),
        seed,
        seed,
        None,
        None,
        None,
        q.shape[0],
        k.shape[0],
        0.0,
        block.causal,
        scale=block.scale,
    )
    dq, dk, dv = map(_rows_first, grads)
    return dq, dk, dv


# CPU: one call per document. With a window, one call per tile of a document; tiles do at most 1.25 times the work of a
# long window.

WINDOW_TILES = (32, 256)
"""The fewest and the most queries of a tile; between the two, a tile has a quarter of the window."""


def cpu_flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
    """Call torch's flash attention for CPU on each document: ``out [tq, heads, dim]``, ``lse [heads, tq]``."""
    out, lse = empty_output(q, value_dim=v.shape[2])
    for rows, keys, mask in _calls(block, q):
        part, part_lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_heads_first, (q[rows], k[keys], v[keys])), 0.0, **mask, scale=block.scale
        )
        out[rows] = _rows_first(part)
        lse[:, rows] = part_lse[0]
    return out, lse


def cpu_flash_backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
    """Return the gradients of ``cpu_flash_forward``: ``dq, dk, dv`` of the shapes of ``q, k, v``."""
    q, k, v, out, lse = saved
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    sums = (dk, dv) if block.window is None else [x.to(accumulation_dtype(x.dtype)) for x in (dk, dv)]
    for rows, keys, mask in _calls(block, q):
        # The operator reads the log-sum-exp as [heads, rows] with rows outermost in memory.
        part_lse = lse[:, rows].t().contiguous().t().unsqueeze(0)
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(_heads_first, (dout[rows], q[rows], k[keys], v[keys], out[rows])),
            part_lse,
            0.0,
            **mask,
            scale=block.scale,
        )
        dq[rows] = _rows_first(parts[0])
        for total, part in zip(sums, parts[1:], strict=True):
            total[keys] += _rows_first(part)
    return dq, sums[0].to(k.dtype), sums[1].to(k.dtype)


def _calls(block: AttentionBlock, q: torch.Tensor) -> Iterator[tuple[slice, slice, dict[str, object]]]:
    """Yield the query rows, the key rows and the mask arguments of each call; ``q``: ``[tq, heads, dim]``."""
    if block.window is None:
        for rows, keys in block.documents():
            yield rows, keys, {"is_causal": block.causal}
        return
    fewest, most = WINDOW_TILES
    for tile in block.tiles(min(max(block.window // 4, fewest), most)):
        mask = torch.zeros((), dtype=q.dtype).masked_fill(tile.hidden(q.device), -torch.inf)
        yield tile.rows, tile.keys, {"is_causal": False, "attn_mask": mask}


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """View ``[t, heads, dim]`` as ``[1, heads, t, dim]``."""
    return x.transpose(0, 1).unsqueeze(0)


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    """View ``[1, heads, t, dim]`` as ``[t, heads, dim]``."""
    return x[0].transpose(0, 1)
