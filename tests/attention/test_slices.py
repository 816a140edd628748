"""Attention slice by slice against the reference on the whole sequence: outputs and all gradients.

Batches of samples without rings; ``layouts/test_slices.py`` tests rings and packs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from bytescale_ext.activation.arena import HostArena
from bytescale_ext.activation.keys import SwappedKeys
from bytescale_ext.activation.link import PlainLink
from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.kernels.contract import Saved
from bytescale_ext.attention.kernels.reference import reference_backward, reference_forward
from bytescale_ext.attention.kernels.table import named_kernel
from bytescale_ext.attention.layouts.rows import PartRows, Rows
from bytescale_ext.attention.layouts.slices import SliceLayout, sample_layouts
from bytescale_ext.attention.slices import KeySwap, LayerPrefix, MicroBatchPrefix, slice_attention
from bytescale_ext.plan.schedule.slices import slice_ranges
from tests.attention.cases import block_of

SCALE = 0.37
SLICES = [(12,), (6, 6), (7, 3, 2), (1, 1, 9, 1), (5, 4, 3), (1,) * 12]


def backend_of(dtype: torch.dtype) -> Backend:
    return Backend(None, named_kernel("cpu", dtype, 8, "cpu_flash" if dtype == torch.float32 else "reference"), SCALE)


def inputs(lengths: tuple[int, ...], heads: int, kv_heads: int, batch: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return q, k, v, dout: [batch, tokens, heads, 8]."""
    generator = torch.Generator().manual_seed(sum(lengths) + heads)
    shapes = ((batch, sum(lengths), count, 8) for count in (heads, kv_heads, kv_heads, heads))
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def whole(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return out, dq, dk, dv of the reference, sample by sample."""
    samples = []
    for q, k, v, dout in zip(*tensors, strict=True):
        block = block_of([len(q)], scale=SCALE)
        out, lse = reference_forward(q, k, v, block)
        samples.append((out, *reference_backward(dout, Saved(q, k, v, out, lse), block)))
    return [torch.stack(parts) for parts in zip(*samples, strict=True)]


def run_in_slices(qkv: Sequence[torch.Tensor], dout: torch.Tensor, num_slices: int, backend: Backend) -> torch.Tensor:
    """Run equal slices of one sequence forward, then backward; return their outputs, [t, heads, dim]."""
    prefix = MicroBatchPrefix().layer("layer")
    pieces = zip(*(tensor.chunk(num_slices) for tensor in qkv), strict=True)
    layouts = sample_layouts((len(dout) // num_slices,) * num_slices, 1)
    outs = [slice_attention(*piece, prefix, layout, backend) for piece, layout in zip(pieces, layouts, strict=True)]
    for part, of_slice in zip(reversed(outs), reversed(dout.chunk(num_slices)), strict=True):
        part.backward(of_slice)
    return torch.cat(outs)


def rows_of(lengths: tuple[int, ...], *tensors: torch.Tensor) -> Iterator[tuple[SliceLayout, list[torch.Tensor]]]:
    """Yield each slice with its rows of the tensors, sample after sample."""
    layouts = sample_layouts(lengths, tensors[0].shape[0])
    for part, layout in zip(slice_ranges(lengths), layouts, strict=True):
        yield layout, [tensor[:, part.start : part.stop].flatten(0, 1) for tensor in tensors]


def in_slices(lengths: tuple[int, ...], *tensors: torch.Tensor, repeat: int = 1) -> list[torch.Tensor]:
    """Return out, dq, dk, dv slice by slice. Forward passes are repeated, as in recomputation."""
    batch, backend = tensors[0].shape[0], backend_of(tensors[0].dtype)
    micro_batch = MicroBatchPrefix()
    runs = []
    for layout, (*qkv, dout) in rows_of(lengths, *tensors):
        leaves = [tensor.clone().requires_grad_() for tensor in qkv]
        prefix = micro_batch.layer("layer")
        for number in range(repeat):
            with torch.set_grad_enabled(number == repeat - 1):
                out = slice_attention(*leaves, prefix, layout, backend)
        runs.append((leaves, out, dout))
    for _, out, dout in reversed(runs):
        out.backward(dout)
    assert not prefix.keys
    assert not prefix.sums
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
    *qkv, dout = inputs(lengths, 2, 1, 1, torch.float64)
    grads = in_slices(lengths, *qkv, dout)[1:]
    generator, step = torch.Generator().manual_seed(3), 1e-6
    for number in range(3):
        direction = torch.randn(qkv[number].shape, generator=generator, dtype=torch.float64)
        up, down = ([*qkv[:number], qkv[number] + sign * step * direction, *qkv[number + 1 :]] for sign in (1, -1))
        ends = [(in_slices(lengths, *moved, dout)[0] * dout).sum() for moved in (up, down)]
        torch.testing.assert_close(
            (ends[0] - ends[1]) / (2 * step), (grads[number] * direction).sum(), rtol=1e-7, atol=0
        )


def test_gradients_of_earlier_keys_are_summed_in_float32() -> None:
    first, second = sample_layouts((3, 2), 1)
    keys = torch.ones(5, 2, 8, dtype=torch.bfloat16)
    prefix = MicroBatchPrefix().layer("layer")
    prefix.write(first, keys[:3], keys[:3])
    prefix.write(second, keys[3:], keys[3:])
    sums = prefix.start_backward(second)
    assert [part.dtype for total in sums for part in total.parts] == [torch.float32] * 4
    assert [tuple(part[0].shape) for part in prefix.sums] == [(3, 2, 8), (2, 2, 8)]


def test_a_slice_holds_its_own_keys_from_its_forward_to_its_backward_pass() -> None:
    """Keys exist for the slices in flight, and sums for the slices before their backward pass."""
    lengths = (5, 4, 3)
    tensors = inputs(lengths, 4, 2, 1, torch.float64)
    prefix, backend = MicroBatchPrefix().layer("layer"), backend_of(torch.float64)
    outs, held = [], []
    for layout, (*qkv, dout) in rows_of(lengths, *tensors):
        outs.append((slice_attention(*(one.requires_grad_() for one in qkv), prefix, layout, backend), dout))
        held.append(sum(len(part[0]) for part in prefix.keys))
    assert held == [5, 9, 12]
    for number, (out, dout) in reversed(list(enumerate(outs))):
        out.backward(dout)
        assert [len(part[0]) for part in prefix.keys] == [len(part[0]) for part in prefix.sums] == [5, 4, 3][:number]


def test_backward_runs_from_the_last_slice_to_the_first() -> None:
    lengths = (5, 4, 3)
    tensors = inputs(lengths, 2, 2, 1, torch.float64)
    prefix = MicroBatchPrefix().layer("layer")
    runs = [
        (slice_attention(*(one.requires_grad_() for one in qkv), prefix, layout, backend_of(torch.float64)), dout)
        for layout, (*qkv, dout) in rows_of(lengths, *tensors)
    ]
    runs[2][0].backward(runs[2][1])
    with pytest.raises(AssertionError, match=r"layout\.index=0"):
        runs[0][0].backward(runs[0][1])


def test_forward_runs_from_the_first_slice_to_the_last() -> None:
    lengths = (3, 2)
    tensors = inputs(lengths, 2, 2, 1, torch.float64)
    _, (layout, (*qkv, _)) = rows_of(lengths, *tensors)
    with pytest.raises(AssertionError, match=r"layout\.index=1"):
        slice_attention(*qkv, LayerPrefix(), layout, backend_of(torch.float64))


def test_each_layer_has_its_own_keys() -> None:
    micro_batch = MicroBatchPrefix()
    first = micro_batch.layer("a")
    assert micro_batch.layer("a") is first
    assert micro_batch.layer("b") is not first


def test_a_slice_of_another_size_is_refused() -> None:
    q, k, v, _ = (tensor.flatten(0, 1) for tensor in inputs((4,), 2, 2, 1, torch.float64))
    first, _ = sample_layouts((5, 3), 1)
    with pytest.raises(ValueError, match="over 5 rows needs q"):
        slice_attention(q, k, v, LayerPrefix(), first, backend_of(q.dtype))


def test_only_queries_outputs_and_sums_are_saved() -> None:
    """The prefix stores keys and values once for all slices."""
    lengths = (5, 3)
    q, k, v, _ = (tensor.requires_grad_() for tensor in inputs(lengths, 2, 2, 1, torch.float64))
    micro_batch = MicroBatchPrefix()
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        for layout, qkv in rows_of(lengths, q, k, v):
            slice_attention(*qkv, micro_batch.layer("a"), layout, backend_of(q.dtype))
    assert [tuple(shape) for shape in saved] == [(5, 2, 8), (5, 2, 8), (2, 5), (3, 2, 8), (3, 2, 8), (2, 3)]


class NotedKeys(SwappedKeys):
    """Swapped keys that record late reads."""

    num_late = 0

    def take(self) -> torch.Tensor:
        NotedKeys.num_late += not self.is_here
        return super().take()

    @property
    def is_here(self) -> bool:
        return self._keys is not None


def swapping(layout: SliceLayout) -> SliceLayout:
    """Layout of samples with all keys in host memory."""
    nothing = PartRows((Rows.of([]),) * len(layout.held.places))
    keys = PartRows(nothing.places + layout.held.places)
    return replace(layout, held=nothing, swapped=layout.held, keys=keys)


def test_swapped_keys_are_read_one_layer_ahead() -> None:
    """With two slices of two micro-batches in three layers, keys are on the device at each use in both passes."""
    lengths = (5, 3)
    tensors = inputs(lengths, 2, 2, 1, torch.float64)
    expected, here = whole(*tensors), []
    link = PlainLink(HostArena(torch.empty(1 << 16, dtype=torch.uint8)))
    prefixes: list[MicroBatchPrefix] = []
    actions = [("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("B", 0, 1), ("F", 1, 1), ("B", 0, 0), ("B", 1, 1), ("B", 1, 0)]
    parts: weakref.WeakSet[NotedKeys] = weakref.WeakSet()

    def to_host(keys: torch.Tensor) -> NotedKeys:
        part = NotedKeys(keys, link)
        parts.add(part)
        return part

    def read_next() -> None:
        for kind, micro_batch, _ in actions[:1]:
            prefixes[micro_batch].read_ahead(backward=kind == "B")

    swap = KeySwap(to_host, read_next)
    prefixes += [MicroBatchPrefix(swap=swap) for _ in range(2)]
    rows, outs = list(rows_of(lengths, *tensors)), {}
    while actions:
        kind, micro_batch, index = actions.pop(0)
        layout, (*qkv, dout) = rows[index]
        for layer in range(3) if kind == "F" else (2, 1, 0):
            if kind == "F":
                leaves = [one.clone().requires_grad_() for one in qkv]
                prefix = prefixes[micro_batch].layer(layer)
                out = slice_attention(*leaves, prefix, swapping(layout), backend_of(torch.float64))
                outs[micro_batch, index, layer] = leaves, out
            else:
                leaves, out = outs.pop((micro_batch, index, layer))
                out.backward(dout)
                start = sum(lengths[:index])
                for leaf, want in zip(leaves, expected[1:], strict=True):
                    torch.testing.assert_close(
                        leaf.grad, want[0, start : start + lengths[index]], rtol=1e-10, atol=1e-10
                    )
            here.append(sum(part.is_here for part in parts))
    assert not NotedKeys.num_late
    assert max(here) == 2  # both slices of the layer that runs next
    assert not link.used_bytes
    assert not any(layer.keys or layer.swapped for prefix in prefixes for layer in prefix.layers.values())


@pytest.mark.parametrize("repeat", [1, 2])
def test_swapped_keys_of_a_recomputed_slice_stay_until_its_backward_pass(repeat: int) -> None:
    lengths = (5, 4, 3)
    tensors = inputs(lengths, 4, 2, 1, torch.float64)
    link = PlainLink(HostArena(torch.empty(1 << 16, dtype=torch.uint8)))
    micro_batch = MicroBatchPrefix(swap=KeySwap(lambda keys: SwappedKeys(keys, link), lambda: None))
    prefix, runs = micro_batch.layer("layer"), []
    for layout, (*qkv, dout) in rows_of(lengths, *tensors):
        leaves = [one.clone().requires_grad_() for one in qkv]
        runs.append((leaves, swapping(layout), dout))
        slice_attention(*(one.detach() for one in leaves), prefix, swapping(layout), backend_of(torch.float64))
        assert all(part._keys is None for part in prefix.swapped)  # type: ignore[attr-defined]
    for (leaves, layout, dout), expected in zip(reversed(runs), expected_slices(lengths, *tensors), strict=True):
        for _ in range(repeat):
            out = slice_attention(*leaves, prefix, layout, backend_of(torch.float64))
            assert all(part._keys is not None for part in prefix.swapped)  # type: ignore[attr-defined]
        out.backward(dout)
        for got, want in zip((out, *(leaf.grad for leaf in leaves)), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert not link.used_bytes


def expected_slices(lengths: tuple[int, ...], *tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Return out, dq, dk, dv of each slice of the only sample, the last slice first."""
    for part in reversed(slice_ranges(lengths)):
        yield [one[0, part.start : part.stop] for one in whole(*tensors)]


def test_a_layout_with_swapped_keys_needs_a_link() -> None:
    (layout, (*qkv, _)), *_ = rows_of((3, 2), *inputs((3, 2), 2, 2, 1, torch.float64))
    with pytest.raises(AssertionError, match="needs a link to host memory"):
        slice_attention(*qkv, LayerPrefix(), swapping(layout), backend_of(torch.float64))
