"""The counter of bytes that autograd saves."""

from __future__ import annotations

import torch

from scripts.bench.pipeline.saved_bytes import SavedBytes


def test_saved_tensors_count_until_they_are_freed() -> None:
    counter = SavedBytes()
    weight = torch.nn.Parameter(torch.ones(8, 8))
    rows = torch.ones(4, 8, requires_grad=True)
    with counter:
        hidden = rows @ weight  # keeps rows (and the weight, which does not count)
        assert counter.held_bytes == 4 * 8 * 4
        out = (hidden * hidden).sum()  # keeps hidden, twice the same storage
        assert counter.held_bytes == 2 * 4 * 8 * 4
        out.backward()
        del out, hidden
    assert counter.held_bytes == 0
    assert counter.peak_bytes == 2 * 4 * 8 * 4
    assert rows.grad is not None
    assert weight.grad is not None
