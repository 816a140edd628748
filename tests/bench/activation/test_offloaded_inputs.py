"""The benchmark's full recompute with inputs in host memory trains like full recompute."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bytescale_ext.activation.arena import HostArena
from bytescale_ext.activation.link import PlainLink
from scripts.bench.activation.offloaded_inputs import OffloadedInputs


class Decoder(torch.nn.Module):
    """Layers that recompute themselves, like Megatron's layers under full recompute."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=True)
        return x


def gradients(decoder: Decoder, offloaded: OffloadedInputs | None) -> list[torch.Tensor]:
    decoder.zero_grad()
    x = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    if offloaded is None:
        decoder(x).sum().backward()
    else:
        with offloaded.during(decoder):
            decoder(x).sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad.clone() for p in decoder.parameters() if p.grad is not None)]


def test_inputs_come_back() -> None:
    decoder = Decoder(5)
    expected = gradients(decoder, None)
    arena = HostArena(torch.empty(1 << 16, dtype=torch.uint8))
    offloaded = OffloadedInputs(PlainLink(arena), 3)
    for _ in range(2):
        got = gradients(decoder, offloaded)
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
        assert arena.used_bytes == 0
    assert arena.peak_bytes == 3 * 256  # all layers except the last two, 160 bytes each, aligned
    tight = OffloadedInputs(PlainLink(HostArena(torch.empty(256, dtype=torch.uint8))), 3)
    assert all(torch.equal(one, other) for one, other in zip(gradients(decoder, tight), expected, strict=True))


def test_a_forward_pass_that_raises_leaves_no_hooks() -> None:
    """A forward pass may run out of memory. The hooks must not affect the next arm of a benchmark."""
    decoder, offloaded = Decoder(5), OffloadedInputs(PlainLink(HostArena(torch.empty(1 << 16, dtype=torch.uint8))), 3)
    with pytest.raises(RuntimeError), offloaded.during(decoder):
        decoder(torch.randn(5, 1, 7))
    x = torch.randn(5, 1, 8, requires_grad=True)
    saved = x.exp().grad_fn._saved_result
    assert isinstance(saved, torch.Tensor)
    assert offloaded.link.used_bytes == 0
    decoder(x).sum().backward()
    assert offloaded.link.used_bytes == 0
