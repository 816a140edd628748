"""Attention slice by slice against the reference on the whole sequence: outputs and all gradients.

Samples side by side, without rings; ``layouts/test_slices.py`` has rings and packs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bytescale_ext.attention.kernels.contract import Saved
from bytescale_ext.attention.kernels.reference import reference_backward, reference_forward
from bytescale_ext.attention.kernels.table import named_kernel
from bytescale_ext.attention.layouts.slices import SliceLayout, sample_layouts
from bytescale_ext.attention.ring import Backend
from bytescale_ext.attention.slices import LayerPrefix, MicroBatchPrefix, slice_attention
from bytescale_ext.plan.schedule.slices import slice_ranges
from tests.attention.cases import block_of

SCALE = 0.37
SLICES = [(12,), (6, 6), (7, 3, 2), (1, 1, 9, 1), (5, 4, 3), (1,) * 12]


def backend_of(dtype: torch.dtype) -> Backend:
    return Backend(None, named_kernel("cpu", dtype, 8, "cpu_flash" if dtype == torch.float32 else "reference"), SCALE)


def inputs(lengths: tuple[int, ...], heads: int, kv_heads: int, batch: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, dout: [batch, tokens, heads, 8]."""
    generator = torch.Generator().manual_seed(sum(lengths) + heads)
    shapes = ((batch, sum(lengths), count, 8) for count in (heads, kv_heads, kv_heads, heads))
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def whole(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """out, dq, dk, dv of the reference, sample by sample."""
    samples = []
    for q, k, v, dout in zip(*tensors, strict=True):
        block = block_of([len(q)], scale=SCALE)
        out, lse = reference_forward(q, k, v, block)
        samples.append((out, *reference_backward(dout, Saved(q, k, v, out, lse), block)))
    return [torch.stack(parts) for parts in zip(*samples, strict=True)]


def rows_of(lengths: tuple[int, ...], *tensors: torch.Tensor) -> Iterator[tuple[SliceLayout, list[torch.Tensor]]]:
    """Each slice with its rows of the tensors, sample after sample."""
    layouts = sample_layouts(lengths, tensors[0].shape[0])
    for part, layout in zip(slice_ranges(lengths), layouts, strict=True):
        yield layout, [tensor[:, part.start : part.stop].flatten(0, 1) for tensor in tensors]


def in_slices(lengths: tuple[int, ...], *tensors: torch.Tensor, repeat: int = 1) -> list[torch.Tensor]:
    """out, dq, dk, dv slice by slice; repeats each forward, as recomputation does, the last time with gradients."""
    batch, backend = tensors[0].shape[0], backend_of(tensors[0].dtype)
    micro_batch = MicroBatchPrefix(batch * sum(lengths))
    runs = []
    for layout, (*qkv, dout) in rows_of(lengths, *tensors):
        leaves = [tensor.clone().requires_grad_() for tensor in qkv]
        prefix = micro_batch.layer("layer", *leaves[1:])
        for number in range(repeat):
            with torch.set_grad_enabled(number == repeat - 1):
                out = slice_attention(*leaves, prefix, layout, backend)
        runs.append((leaves, out, dout))
    for _, out, dout in reversed(runs):
        out.backward(dout)
    assert prefix.sums is None
    assert prefix.next_backward is None
    found = [[out.detach(), *(leaf.grad for leaf in leaves)] for leaves, out, _ in runs]
    return [torch.cat([part.unflatten(0, (batch, -1)) for part in parts], 1) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("lengths", SLICES)
@pytest.mark.parametrize(("heads", "kv_heads", "batch"), [(2, 2, 1), (4, 2, 1), (4, 1, 3)])
def test_slices_give_the_whole_in_float64(lengths: tuple[int, ...], heads: int, kv_heads: int, batch: int) -> None:
    tensors = inputs(lengths, heads, kv_heads, batch, torch.float64)
    for got, expected in zip(in_slices(lengths, *tensors), whole(*tensors), strict=True):
        assert got.dtype == torch.float64
        assert (got - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_slices_give_the_whole_in_less_precision(dtype: torch.dtype, tolerance: float) -> None:
    lengths = (40, 30, 20)
    tensors = inputs(lengths, 4, 2, 2, dtype)
    expected = whole(*(tensor.double() for tensor in tensors))
    for got, want in zip(in_slices(lengths, *tensors), expected, strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).abs().max() <= tolerance * want.abs().max()


def test_recomputing_a_slice_changes_nothing() -> None:
    lengths = (5, 4, 3)
    tensors = inputs(lengths, 4, 2, 1, torch.float64)
    once, twice = in_slices(lengths, *tensors), in_slices(lengths, *tensors, repeat=2)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_gradients_match_finite_differences() -> None:
    lengths = (3, 2)
    q, k, v, _ = (tensor.requires_grad_() for tensor in inputs(lengths, 2, 1, 1, torch.float64))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """All slices as one function; autograd runs the backward of the last slice first."""
        micro_batch = MicroBatchPrefix(5)
        outs = []
        for layout, qkv in rows_of(lengths, q, k, v):
            prefix = micro_batch.layer("layer", *qkv[1:])
            outs.append(slice_attention(*qkv, prefix, layout, backend_of(q.dtype)))
        return torch.cat(outs)

    assert torch.autograd.gradcheck(attend, (q, k, v))


def test_gradients_of_earlier_keys_are_summed_in_float32() -> None:
    key = torch.zeros(12, 2, 8, dtype=torch.bfloat16)
    micro_batch = MicroBatchPrefix(12)
    layer = micro_batch.layer("layer", key[:3], key[:3])
    assert micro_batch.num_bytes == 2 * 12 * 2 * 8 * 2
    assert all(total.dtype == torch.float32 for total in layer.start_backward(4))
    assert micro_batch.num_bytes == 2 * 12 * 2 * 8 * (2 + 4)


def test_backward_runs_from_the_last_slice_to_the_first() -> None:
    layer = LayerPrefix(torch.zeros(6, 1, 8), torch.zeros(6, 1, 8))
    layer.start_backward(2)
    with pytest.raises(AssertionError, match="next_backward"):
        layer.start_backward(0)


def test_each_layer_has_its_own_buffers() -> None:
    micro_batch = MicroBatchPrefix(6)
    key, value = torch.zeros(2, 1, 8), torch.zeros(2, 1, 8)
    first = micro_batch.layer("a", key, value)
    assert micro_batch.layer("a", key, value) is first
    assert micro_batch.layer("b", key, value) is not first
    assert first.key.shape == first.value.shape == (6, 1, 8)


def test_a_slice_of_another_size_is_refused() -> None:
    q, k, v, _ = (tensor.flatten(0, 1) for tensor in inputs((4,), 2, 2, 1, torch.float64))
    first, _ = sample_layouts((5, 3), 1)
    with pytest.raises(ValueError, match="over 5 rows needs q"):
        slice_attention(q, k, v, LayerPrefix(k, v), first, backend_of(q.dtype))


def test_only_queries_outputs_and_sums_are_saved() -> None:
    """Keys and values lie in the buffer, once for all slices."""
    lengths = (5, 3)
    q, k, v, _ = (tensor.requires_grad_() for tensor in inputs(lengths, 2, 2, 1, torch.float64))
    micro_batch = MicroBatchPrefix(8)
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        for layout, qkv in rows_of(lengths, q, k, v):
            slice_attention(*qkv, micro_batch.layer("a", *qkv[1:]), layout, backend_of(q.dtype))
    assert [tuple(shape) for shape in saved] == [(5, 2, 8), (5, 2, 8), (2, 5), (3, 2, 8), (3, 2, 8), (2, 3)]
