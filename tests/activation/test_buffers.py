"""Rotating buffers receive returning tensors in turn, and change no value."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from bytescale_ext.activation.buffers import RoundingBuffers, reserve
from tests.activation.test_run import PLANS, inputs_of, make_layers, make_store, results

CPU = torch.device("cpu")


@dataclass(eq=False)
class Layer:
    """User of a buffer, like a layer's record."""

    is_waiting: bool = True


def test_two_layers_have_buffers_and_a_third_waits_for_one() -> None:
    buffers, layers = RoundingBuffers(1024, CPU), [Layer(), Layer(), Layer()]
    first, second = (buffers.take(layer, [300, 200]) for layer in layers[:2])
    assert first is not None
    assert second is not None
    assert [part.numel() for part in first] == [300, 200]
    assert first[1].data_ptr() - first[0].data_ptr() == 512  # parts begin at multiples of the alignment
    assert first[0].data_ptr() != second[0].data_ptr()
    assert buffers.take(layers[2], [300]) is None
    layers[0].is_waiting = False
    third = buffers.take(layers[2], [300])
    assert third is not None
    assert third[0].data_ptr() == first[0].data_ptr()
    assert (buffers.num_taken, buffers.num_refused) == (3, 1)


@pytest.mark.slow
def test_layers_come_back_through_buffers_with_equal_gradients() -> None:
    for name in ("swap-only", "memo-0.4", "priced-three-shares"):
        plain = make_store(PLANS[name])
        expected = results(make_layers(plain, 4), inputs_of(40), inputs_of(40, seed=2))
        store = make_store(PLANS[name])
        store.buffers = RoundingBuffers(plain.counts.restored_bytes, CPU)
        got = results(make_layers(store, 4), inputs_of(40), inputs_of(40, seed=2))
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True)), name
        assert store.buffers.num_taken > 0
        assert store.buffers.num_refused == 0
        held = store.buffers._buffers
        assert any(buffer is not None for buffer in held)
        store.check_empty()
        assert store.buffers._buffers == [None, None]


def test_what_cannot_be_reserved_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(0, CPU)
    reserve(100, CPU)

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.warns(UserWarning, match="2 GB for the memory plan could not be reserved"):
        reserve(2_000_000_000, CPU)


def test_buffers_are_given_up_when_nothing_is_in_them() -> None:
    """A forward pass uses no part of the buffers, unless another micro-batch has not returned yet."""
    buffers, layers = RoundingBuffers(1024, CPU), [Layer(), Layer()]
    for layer in layers:
        assert buffers.take(layer, [1000]) is not None
    layers[0].is_waiting = False
    buffers.release()
    assert [buffer is None for buffer in buffers._buffers] == [True, False]
    layers[1].is_waiting = False
    buffers.release()
    assert buffers._buffers == [None, None]


def test_the_memory_of_a_step_has_no_buffers_in_the_next_forward_pass() -> None:
    store = make_store(PLANS["swap-only"])
    layers = make_layers(store)
    results(layers, inputs_of(40))
    store.buffers = RoundingBuffers(store.counts.restored_bytes, CPU)
    results(layers, inputs_of(40))
    assert any(buffer is not None for buffer in store.buffers._buffers)
    layers[0](inputs_of(40))
    assert store.buffers._buffers == [None, None]
