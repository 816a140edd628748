"""A Triton kernel that finds the largest scores of a block; ``largest.py`` does the same with torch's operators.

Torch's operators write each tile of scores to memory and read it again. This kernel keeps a tile in registers, as
attention kernels do. Tests run it on a CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from bytescale_ext.attention.layouts.blocks import AttentionBlock

QUERIES, KEYS = 128, 64
"""Queries and keys of a tile."""


def fused_raise_largest_(largest: torch.Tensor, q: torch.Tensor, k: torch.Tensor, block: AttentionBlock) -> None:
    """Raise ``largest [heads]`` in place. See ``raise_largest_`` for shapes; float64 is not supported."""
    num_rows, heads, dim = block.cu_q.num_tokens, q.shape[1], q.shape[2]
    if not num_rows or not block.cu_k.num_tokens:
        return
    q, k = (one if one.stride(2) == 1 else one.contiguous() for one in (q, k))
    first, stop = block.seen_keys(slice(0, num_rows), q.device)
    found = torch.empty((heads, num_rows), dtype=torch.float32, device=q.device)
    program()[(triton.cdiv(num_rows, QUERIES), heads)](
        q, k, first, stop, found, num_rows, heads // k.shape[1],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        DIM=dim, WIDTH=max(16, triton.next_power_of_2(dim)), QUERIES=QUERIES, KEYS=KEYS, num_warps=8, num_stages=2,
    )  # fmt: skip
    torch.maximum(largest, found.amax(1).mul_(block.scale), out=largest)


@lru_cache(maxsize=1)
def program() -> triton.runtime.KernelInterface:
    """Return the kernel. Triton compiles it at its first use, or interprets it if ``TRITON_INTERPRET`` is set."""
    return triton.jit(_largest, do_not_specialize=["num_rows"])


def _largest(
    q: tl.tensor, k: tl.tensor, first: tl.tensor, stop: tl.tensor, found: tl.tensor,
    num_rows: tl.tensor, group: tl.tensor,
    q_row: tl.tensor, q_head: tl.tensor, k_row: tl.tensor, k_head: tl.tensor,
    DIM: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    """Find the largest score of one tile of queries and one head. Pointers come first, sizes and strides follow."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tile * QUERIES + tl.arange(0, QUERIES)
    is_row = row < num_rows
    column = tl.arange(0, WIDTH)
    is_column = column < DIM
    row_at = q + row.to(tl.int64) * q_row + head * q_head  # offsets of rows exceed 32 bits
    queries = tl.load(row_at[:, None] + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
    row_first = tl.load(first + row, mask=is_row, other=2147483647)
    row_stop = tl.load(stop + row, mask=is_row, other=0)
    start = tl.load(first + tile * QUERIES)  # neither bound descends from row to row
    end = tl.load(stop + tl.minimum(tile * QUERIES + QUERIES, num_rows) - 1)
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    for tile_start in tl.range(start, end, KEYS):
        key = tile_start + tl.arange(0, KEYS)
        is_key = key < end
        key_at = k + key.to(tl.int64) * k_row + (head // group) * k_head
        keys = tl.load(key_at[None, :] + column[:, None], mask=is_column[:, None] & is_key[None, :], other=0.0)
        scores = tl.dot(queries, keys, input_precision="ieee")
        seen = (key[None, :] >= row_first[:, None]) & (key[None, :] < row_stop[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        largest = tl.maximum(largest, tl.reduce(scores, 1, tl.standard._elementwise_max))
    tl.store(found + head * num_rows + row, largest, mask=is_row)
