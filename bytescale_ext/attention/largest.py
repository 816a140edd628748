"""The largest score of each head, which kernels do not return: their log-sum-exp is only an upper bound.

The products of queries and keys are computed once more, in tiles::

    keys            0 . . . . . . . . n       queries of a tile, of one document or of several, see keys from ``first``
    queries 0-511   x x                       to ``stop``; a tile of scores that some query does not see is masked
    queries 512-    x x x x

This costs half of a forward pass of attention, and memory for one tile. Nothing waits for the device. On CUDA a Triton
kernel does it without memory for tiles (``fused_largest.py``), if ``choose_largest`` finds that it runs and is correct.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Final

import torch

from bytescale_ext.attention.kernels.contract import HALF, accumulation_dtype
from bytescale_ext.attention.kernels.probes import failure, why_not_triton
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens

LargestFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBlock], None]
TILE_QUERIES, LEAST_QUERIES = 512, 64
"""Most queries of a tile, and their number if documents are shorter."""
TILE_SCORES = {"cuda": 1 << 24, "cpu": 1 << 20}
"""Scores of all heads in a tile, by type of device; 4 bytes each."""

TOLERANCE: Final = 1e-5
"""Tolerance of the fused kernel against torch. Both sum in float32, but in different orders."""
PROBES: Final = (
    ((1, 130, 0, 63, 200), (1, 130, 0, 63, 200), True, None),
    ((5, 140), (300, 70), False, None),
    ((9, 260), (20, 300), True, 40),
)
"""Lengths of documents of queries and keys, whether they are causal, and the window of each probe."""


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
    """Yield the rows of tiles; only rows of documents. In large tiles of short documents most scores are masked."""
    num_rows = min(num_rows, block.cu_q.num_tokens)
    step = min(TILE_QUERIES, max(LEAST_QUERIES, block.cu_q.longest))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


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
    """Return the mask of the keys that each query of a tile does not see, bool ``[queries, keys]``."""
    first, stop = block.seen_keys(rows, device)
    key = torch.arange(keys.start, keys.stop, dtype=first.dtype, device=device)
    return (key < first[:, None]) | (key >= stop[:, None])


def choose_largest(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[LargestFunction, str | None]:
    """Return the fused kernel if it runs and passes a probe, else torch's operators and the reason. No communication.

    ``dtype`` and ``head_dim`` describe queries and keys, ``[t, heads, head_dim]``.
    """
    why_not = why_not_triton(device) or ("it is not for float64" if dtype == torch.float64 else None)
    if why_not is not None:
        return raise_largest_, why_not
    from bytescale_ext.attention.fused_largest import fused_raise_largest_

    why_not = probe_largest(fused_raise_largest_, device, dtype, head_dim)
    return (raise_largest_ if why_not else fused_raise_largest_), why_not


def probe_largest(function: LargestFunction, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Find the largest scores ``[heads]`` of small blocks, compare them with torch, and return why a function is unfit.

    Returns None for a fit function. ``dtype`` and ``head_dim``: see ``choose_largest``.
    """
    generator = torch.Generator().manual_seed(0)
    for lengths_q, lengths_k, causal, window in PROBES:
        block = AttentionBlock(CuSeqlens.of_lengths(lengths_q), CuSeqlens.of_lengths(lengths_k), causal, 0.3, window)
        q = torch.randn(sum(lengths_q), 4, head_dim, generator=generator).to(device, dtype)
        k = torch.randn(sum(lengths_k), 2, head_dim, generator=generator).to(device, dtype)
        expected, found = (torch.full((4,), -torch.inf, dtype=torch.float32, device=device) for _ in range(2))
        raise_largest_(expected, q, k, block)
        try:
            function(found, q, k, block)
        except Exception as error:
            return failure(error)
        if not torch.allclose(found, expected, TOLERANCE, TOLERANCE):
            return "its probe differs from torch"
    return None
