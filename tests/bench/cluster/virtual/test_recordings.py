"""Parts of a recording: its kernel, repeated layers, its documents, and the times that it plans with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bytescale_ext.attention.kernels.contract import Saved
from bytescale_ext.attention.kernels.reference import reference_backward, reference_forward
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens
from bytescale_ext.measure.devices import device_cost
from scripts.bench.cluster.virtual.cases import SCALE, Case
from scripts.bench.cluster.virtual.dense import dense_backward, dense_forward
from scripts.bench.cluster.virtual.events import Begin, Collective, End, Message, Post, Wait, Work
from scripts.bench.cluster.virtual.expand import expanded
from scripts.bench.cluster.virtual.times import NO_HOST, DeviceTimes, ModelTimes, planned_cost
from tests.bench.cluster.virtual.samples import MODEL, RECORDED


@pytest.mark.parametrize(("keys", "is_causal"), [((5, 1, 9), True), ((4, 7, 3), False)])
@pytest.mark.parametrize("rows", [2, 6, 15])
def test_the_kernel_of_recordings_equals_the_reference(
    keys: tuple[int, ...], is_causal: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.bench.cluster.virtual.dense.ROWS", rows)
    cu_q, cu_k = CuSeqlens.of_lengths([5, 1, 9]), CuSeqlens.of_lengths(keys)
    block = AttentionBlock(cu_q, cu_k, is_causal, 0.25)
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(15, 4, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(cu_k.num_tokens, 2, 16, generator=generator) for _ in range(2))
    out, lse = reference_forward(q, k, v, block)
    saved = Saved(q, k, v, out, lse)
    torch.testing.assert_close(dense_forward(q, k, v, block), (out, lse))
    torch.testing.assert_close(dense_backward(dout, saved, block), reference_backward(dout, saved, block))


def test_a_recorded_layer_runs_as_several_layers() -> None:
    work, send = Work("before", False, 8), Post(7, "ring", "keys", (Message(True, 1, 8),))
    reduce = Collective(9, "all", "reduce", (0, 1), 8)
    gather = Collective(3, "all", "gather", (0, 1), 8)
    events = [gather, Begin(True), Wait(3), send, work, Wait(7), reduce, End(), Wait(9)]
    assert list(expanded(events, 2)) == [
        gather._replace(ticket=1), Wait(1), send._replace(ticket=2), work, Wait(2),
        send._replace(ticket=3), work, Wait(3), reduce._replace(ticket=4), Wait(4),
    ]  # fmt: skip


def test_documents_keep_their_tokens_and_fill_all_steps_equally() -> None:
    case = Case("github")
    lengths = case.lengths(3, seed=1)
    assert len(lengths) % (3 * case.num_ranks) == 0
    assert max(lengths) <= case.context // SCALE
    assert sum(lengths) * SCALE == pytest.approx(3 * case.num_ranks * 131072, rel=0.1)


def test_plans_follow_the_shipped_costs_of_the_device() -> None:
    """In recorded tokens, and for the one recorded layer."""
    times = ModelTimes(MODEL, RECORDED, DeviceTimes.read("h100"), NO_HOST, SCALE)
    cost, shipped = planned_cost(times, 50e9), device_cost("h100")
    both, known = cost.whole().both, shipped.whole().both
    both = replace(both, a=both.a / SCALE**2, b=both.b / SCALE, c=both.c / SCALE, h=both.h / SCALE)
    for name in "abcghm":
        assert getattr(both, name) == pytest.approx(getattr(known, name), rel=1e-6)
    assert cost.slowdown == pytest.approx(shipped.slowdown, rel=1e-6)


def test_an_unknown_device_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="h100, h200"):
        DeviceTimes.read("v100")
