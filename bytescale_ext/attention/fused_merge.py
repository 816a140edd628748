"""A Triton kernel that joins blocks of keys; ``merge.py`` has the formulas and the same with torch's operators.

Torch's operators read and write the float32 totals several times. This kernel reads totals and block once and writes
the totals once. It finds rows in several intervals by their index, without copying them. Tests run the kernel on a CPU
in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from bytescale_ext.attention.kernels.contract import Output
from bytescale_ext.attention.layouts.rows import Rows

ELEMENTS = 2048
"""Number of values of ``out`` per program."""


def fused_join_(totals: Output, part: Output, rows: Rows) -> None:
    """Join one block of keys to rows of running totals, in place. See ``merge.join_`` for shapes and dtypes."""
    (out, lse), (part_out, part_lse) = totals, part
    num_rows, heads, dim = part_out.shape
    if not part_out.numel():
        return
    part_out = part_out if part_out.stride(2) == 1 else part_out.contiguous()
    assert out.stride(2) == 1 and num_rows * heads < 1 << 31, f"{out.shape=} {out.stride()=}"
    width = triton.next_power_of_2(dim)
    pairs = max(1, ELEMENTS // width)
    start = rows.intervals[0][0]
    index = lse if rows.is_view else rows.index(out.device)  # rows in one interval need no index: any pointer
    program()[(triton.cdiv(num_rows * heads, pairs),)](
        out, lse, part_out, part_lse, index, start, num_rows * heads, heads,
        out.stride(0), out.stride(1), lse.stride(0), lse.stride(1),
        part_out.stride(0), part_out.stride(1), part_lse.stride(0), part_lse.stride(1),
        IS_VIEW=rows.is_view, DIM=dim, WIDTH=width, PAIRS=pairs,
    )  # fmt: skip


@lru_cache(maxsize=1)
def program() -> triton.runtime.KernelInterface:
    """Return the kernel. Triton compiles it at its first use, or interprets it if ``TRITON_INTERPRET`` is set."""
    return triton.jit(_join, do_not_specialize=["start", "num_pairs"])


def _join(
    out: tl.tensor, lse: tl.tensor, part_out: tl.tensor, part_lse: tl.tensor,
    index: tl.tensor, start: tl.tensor, num_pairs: tl.tensor, heads: tl.tensor,
    out_row: tl.tensor, out_head: tl.tensor, lse_head: tl.tensor, lse_row: tl.tensor,
    part_row: tl.tensor, part_head: tl.tensor, part_lse_head: tl.tensor, part_lse_row: tl.tensor,
    IS_VIEW: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    """Join ``PAIRS`` pairs of a row and a head. Pointers and sizes come first, then the strides of rows and heads."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    is_pair = pair < num_pairs
    row, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)  # offsets of rows exceed 32 bits
    if IS_VIEW:
        target = row + start
    else:
        target = tl.load(index + row, mask=is_pair, other=0)
    lse_at = lse + head * lse_head + target * lse_row
    mine = tl.load(lse_at, mask=is_pair, other=0.0)
    other = tl.load(part_lse + head * part_lse_head + row * part_lse_row, mask=is_pair, other=0.0)
    largest = tl.maximum(mine, other)
    has_keys = largest != float("-inf")
    shift = tl.where(has_keys, largest, 0.0)
    keep, take = tl.exp(mine - shift), tl.exp(other - shift)
    total = tl.where(has_keys, keep + take, 1.0)
    keep = tl.where(has_keys, keep / total, 1.0)
    take = take / total
    column = tl.arange(0, WIDTH)
    is_value = is_pair[:, None] & (column < DIM)[None, :]
    out_at = out + (target * out_row + head * out_head)[:, None] + column[None, :]
    part_at = part_out + (row * part_row + head * part_head)[:, None] + column[None, :]
    before = tl.load(out_at, mask=is_value, other=0.0).to(lse.dtype.element_ty)
    added = tl.load(part_at, mask=is_value, other=0.0).to(lse.dtype.element_ty)
    tl.store(out_at, before * keep[:, None] + added * take[:, None], mask=is_value)
    tl.store(lse_at, tl.where(has_keys, shift + tl.log(total), float("-inf")), mask=is_pair)
