"""The largest score of each head, which kernels do not return: their log-sum-exp is only an upper bound.

The products of queries and keys are computed once more, in tiles::

    keys            0 . . . . . . . . n       queries of a tile, of one document or of several, see keys from ``first``
    queries 0-511   x x                       to ``stop``; a tile of scores that some query does not see is masked
    queries 512-    x x x x

This costs half of a forward pass of attention, and memory for one tile. Nothing waits for the device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import torch

from bytescale_ext.attention.kernels.contract import accumulation_dtype
from bytescale_ext.attention.layouts.blocks import AttentionBlock

TILE_QUERIES = 512
TILE_SCORES = {"cuda": 1 << 24, "cpu": 1 << 20}
"""Scores of all heads in a tile, by type of device; 4 bytes each."""

HALF = (torch.bfloat16, torch.float16)


def raise_largest_(largest: torch.Tensor, q: torch.Tensor, k: torch.Tensor, block: AttentionBlock) -> None:
    """Raise the largest score of each head to the largest scaled score of a block, in place.

    Scores are sums in the accumulation dtype, as in kernels. Sinks are no scores of keys.

    Args:
        largest: ``[heads]`` in the accumulation dtype; minus infinity before the first score.
        q: queries, ``[tq, heads, dim]``.
        k: keys, ``[tk, kv_heads, dim]``; query head h uses key head ``h // (heads / kv_heads)``.
        block: documents of the queries and keys.
    """
    kv_heads = k.shape[1]
    for rows in _query_tiles(block, q.shape[0]):
        first, stop = _seen(block, rows.start)[0], _seen(block, rows.stop - 1)[1]
        queries = q[rows].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        width = max(1, TILE_SCORES.get(q.device.type, TILE_SCORES["cpu"]) // (q.shape[1] * (rows.stop - rows.start)))
        for start in range(first, stop, width):
            keys = slice(start, min(start + width, stop))
            scores = products(queries, k[keys].permute(1, 2, 0)).unflatten(1, (q.shape[1] // kv_heads, -1))
            if not _sees_all(block, rows, keys):
                scores.masked_fill_(_hidden(block, rows, keys, q.device), -torch.inf)
            torch.maximum(largest, scores.amax((2, 3)).flatten().mul_(block.scale), out=largest)


def products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return ``queries [n, rows, dim] @ keys [n, dim, columns]`` in the accumulation dtype."""
    if queries.dtype in HALF and queries.device.type == "cuda":
        return torch.bmm(queries, keys, out_dtype=torch.float32)
    dtype = accumulation_dtype(queries.dtype)
    return torch.bmm(queries.to(dtype), keys.to(dtype))


def _query_tiles(block: AttentionBlock, num_rows: int) -> Iterator[slice]:
    """Yield the rows of tiles; only rows of documents."""
    num_rows = min(num_rows, block.cu_q.num_tokens)
    for start in range(0, num_rows, TILE_QUERIES):
        yield slice(start, min(start + TILE_QUERIES, num_rows))


def _seen(block: AttentionBlock, row: int) -> tuple[int, int]:
    """Return the first key that a query sees, and the key after the last. Both never descend from row to row."""
    document = bisect_right(block.cu_q.offsets, row) - 1
    first, stop = block.cu_k.offsets[document : document + 2]
    if block.causal:
        stop -= block.cu_q.offsets[document + 1] - row - 1  # the last query has the position of the last key
        first = first if block.window is None else max(first, stop - 1 - block.window)
    return first, stop


def _sees_all(block: AttentionBlock, rows: slice, keys: slice) -> bool:
    """Return whether every query of a tile sees all its keys."""
    first, stop = _seen(block, rows.stop - 1)[0], _seen(block, rows.start)[1]
    return bool(first <= keys.start and keys.stop <= stop)


def _hidden(block: AttentionBlock, rows: slice, keys: slice, device: torch.device) -> torch.Tensor:
    """Return the mask of the keys that each query of a tile does not see, bool ``[queries, keys]``; see ``_seen``."""
    cu_q, cu_k = block.cu_q.on(device), block.cu_k.on(device)
    row = torch.arange(rows.start, rows.stop, dtype=cu_q.dtype, device=device)
    document = torch.bucketize(row, cu_q[1:], right=True)
    first, stop = cu_k[document], cu_k[document + 1]
    if block.causal:
        stop = stop - (cu_q[document + 1] - row - 1)
        first = first if block.window is None else torch.maximum(first, stop - 1 - block.window)
    key = torch.arange(keys.start, keys.stop, dtype=cu_k.dtype, device=device)
    return (key < first[:, None]) | (key >= stop[:, None])
