"""Attention slice by slice against the reference on the whole sequence: outputs and all gradients."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.attention.kernels import Kernel, kernel_table, named_kernel
from bytescale_ext.attention.prefix_kv import LayerPrefix, MicroBatchPrefix, SlicePlace, prefix_attention
from bytescale_ext.attention.reference import reference_backward, reference_forward
from bytescale_ext.plan.slices import slice_ranges

SCALE = 0.37
SLICES = [(12,), (6, 6), (7, 3, 2), (1, 1, 9, 1), (5, 4, 3), (1,) * 12]


def kernel_of(dtype: torch.dtype) -> Kernel:
    return named_kernel("cpu", dtype, 8, "cpu_flash" if dtype == torch.float32 else "reference")


def inputs(lengths: tuple[int, ...], heads: int, kv_heads: int, batch: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) + heads)
    shapes = ((sum(lengths), batch, count, 8) for count in (heads, kv_heads, kv_heads, heads))
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
    """out, dq, dk, dv of the reference, sample by sample."""
    samples = []
    for sample in zip(*(tensor.unbind(1) for tensor in (q, k, v, dout)), strict=True):
        out, lse = reference_forward(*sample[:3], True, SCALE)
        samples.append((out, *reference_backward(sample[3], *sample[:3], out, lse, True, SCALE)))
    return [torch.stack(parts, 1) for parts in zip(*samples, strict=True)]


def in_slices(
    lengths: tuple[int, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, repeat: int = 1
) -> list[torch.Tensor]:
    """The same slice by slice; ``repeat`` times forward, as recomputation would, the last time with gradients."""
    kernel, micro_batch = kernel_of(q.dtype), MicroBatchPrefix(q.shape[0])
    runs = []
    for part in slice_ranges(lengths):
        leaves = [tensor[part.start : part.stop].clone().requires_grad_() for tensor in (q, k, v)]
        prefix = micro_batch.layer("layer", *leaves[1:])
        place = SlicePlace(part, q.shape[1])
        for number in range(repeat):
            with torch.set_grad_enabled(number == repeat - 1):
                out = prefix_attention(*leaves, prefix, place, kernel, SCALE)
        runs.append((part, leaves, out))
    for part, _, out in reversed(runs):
        out.backward(dout[part.start : part.stop])
    outs = torch.cat([out.detach() for _, _, out in runs])
    return [outs, *(torch.cat([leaves[i].grad for _, leaves, _ in runs]) for i in range(3))]


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


def test_gradients_are_those_of_finite_differences() -> None:
    lengths = (3, 2)
    q, k, v, _ = (tensor.requires_grad_() for tensor in inputs(lengths, 2, 1, 1, torch.float64))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """All slices as one function: the later slice's backward runs first, since autograd goes from new to old."""
        micro_batch = MicroBatchPrefix(5)
        outs = []
        for part in slice_ranges(lengths):
            rows = slice(part.start, part.stop)
            prefix = micro_batch.layer("layer", k[rows], v[rows])
            outs.append(
                prefix_attention(q[rows], k[rows], v[rows], prefix, SlicePlace(part), kernel_of(q.dtype), SCALE)
            )
        return torch.cat(outs)

    assert torch.autograd.gradcheck(attend, (q, k, v))


def test_gradients_of_earlier_keys_are_summed_in_float32() -> None:
    lengths = (8, 1, 1, 1, 1)
    tensors = inputs(lengths, 2, 2, 1, torch.bfloat16)
    micro_batch = MicroBatchPrefix(12)
    layer = micro_batch.layer("layer", tensors[1], tensors[2])
    assert layer.key_grad is None
    layer.start_backward(slice_ranges(lengths)[-1])
    assert layer.key_grad is not None and layer.key_grad.dtype == torch.float32
    assert micro_batch.num_bytes == 2 * 12 * 2 * 8 * (2 + 4)


def test_backward_runs_from_the_last_slice_to_the_first() -> None:
    parts = slice_ranges((2, 2, 2))
    layer = LayerPrefix(torch.zeros(1, 6, 1, 8), torch.zeros(1, 6, 1, 8))
    layer.start_backward(parts[2])
    with pytest.raises(AssertionError, match="next_backward"):
        layer.start_backward(parts[0])


def test_layers_have_buffers_of_their_own() -> None:
    micro_batch = MicroBatchPrefix(6)
    key, value = torch.zeros(2, 3, 1, 8), torch.zeros(2, 3, 1, 4)
    first = micro_batch.layer("a", key, value)
    assert micro_batch.layer("a", key, value) is first
    assert micro_batch.layer("b", key, value) is not first
    assert first.key.shape == (3, 6, 1, 8) and first.value.shape == (3, 6, 1, 4)


def test_a_slice_of_another_size_is_a_bug() -> None:
    q, k, v, _ = inputs((4,), 2, 2, 1, torch.float64)
    micro_batch = MicroBatchPrefix(8)
    with pytest.raises(AssertionError, match="place"):
        place = SlicePlace(slice_ranges((5, 3))[0])
        prefix_attention(q, k, v, micro_batch.layer("layer", k, v), place, kernel_of(q.dtype), SCALE)


def test_only_queries_outputs_and_sums_are_saved() -> None:
    """Keys and values are in the buffer, once for all slices."""
    assert [kernel.name for kernel in kernel_table()][-1] == "reference"
    lengths = (5, 3)
    q, k, v, _ = (tensor.requires_grad_() for tensor in inputs(lengths, 2, 2, 1, torch.float64))
    micro_batch = MicroBatchPrefix(8)
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        for part in slice_ranges(lengths):
            rows = slice(part.start, part.stop)
            prefix = micro_batch.layer("layer", k[rows], v[rows])
            prefix_attention(q[rows], k[rows], v[rows], prefix, SlicePlace(part), kernel_of(q.dtype), SCALE)
    assert [tuple(shape) for shape in saved] == [(5, 2, 8), (5, 2, 8), (2, 5), (3, 2, 8), (3, 2, 8), (2, 3)]
