"""Layers use their parameters through a window on the device. Their results are bitwise equal."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from bytescale_ext.states import window
from bytescale_ext.states.window import HostedParameters, LayerWindow

NUM_LAYERS, WIDTH = 6, 8
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
OTHER_BYTES = 4 * (5 * WIDTH + 3 * WIDTH)


class Product(torch.autograd.Function):
    """Matrix product that saves its weight like Megatron's linear layers: the parameter, not a view of it."""

    @staticmethod
    def forward(ctx, hidden, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        hidden, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ hidden


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        normed: torch.Tensor = nn.functional.rms_norm(hidden, (WIDTH,), self.scale)
        return hidden + torch.tanh(Product.apply(normed, self.weight)), None


class Part(nn.Module):
    def __init__(self, is_recomputed: bool = False) -> None:
        super().__init__()
        self.first, self.layers = nn.Embedding(5, WIDTH), nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.last, self.is_recomputed = nn.Parameter(torch.randn(3, WIDTH)), is_recomputed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.first(tokens)
        for layer in self.layers:
            hidden, _ = checkpoint(layer, hidden, use_reentrant=True) if self.is_recomputed else layer(hidden)
        return Product.apply(hidden, self.last).square().sum()


def windowed(part: Part, num_layers: int) -> LayerWindow:
    return LayerWindow(part, list(part.layers), set(part.parameters()), num_layers, torch.device("cpu"))


class Live:
    """Counts the bytes of fetched parameters that are still referenced, and their peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storages: list[tuple[StorageWeakRef, int]] = []
        self.most, fetch = 0, HostedParameters.fetch

        def fetch_and_count(hosted: HostedParameters, link: window.Link) -> None:
            was_on_device = hosted.on_device
            fetch(hosted, link)
            if not was_on_device and hosted._copying is not None:
                self.storages += [
                    (StorageWeakRef(one.untyped_storage()), one.nbytes) for one in hosted._copying[0]
                ]  # fmt: skip
            self.most = max(self.most, self.now)

        monkeypatch.setattr(HostedParameters, "fetch", fetch_and_count)

    @property
    def now(self) -> int:
        return sum(size for storage, size in self.storages if not storage.expired())


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("num_layers", [1, 2, NUM_LAYERS + 3])
def test_passes_are_those_of_resident_layers(
    num_layers: int, is_recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    resident = Part(is_recomputed)
    hosted = copy.deepcopy(resident)
    live, its_window = Live(monkeypatch), windowed(hosted, num_layers)
    tokens = torch.tensor([0, 3, 3, 1])
    for _ in range(2):
        losses = [part(tokens) for part in (resident, hosted)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        its_window.release()
        for expected, found in zip(resident.parameters(), hosted.parameters(), strict=True):
            assert expected.grad is not None
            assert found.grad is not None
            assert torch.equal(expected.grad, found.grad)
            with torch.no_grad():
                expected.sub_(0.1 * expected.grad)
                found.sub_(0.1 * found.grad)  # in host memory, and the next pass must use it
    assert live.most == min(num_layers, NUM_LAYERS) * LAYER_BYTES + OTHER_BYTES
    assert live.now == 0


def test_passes_fetch_ahead_in_their_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part()
    fetched: list[object] = []
    its_window = windowed(part, 2)
    fetch = HostedParameters.fetch

    def fetch_and_note(hosted: HostedParameters, link: window.Link) -> None:
        if not hosted.on_device:
            fetched.append(its_window._layers.index(hosted) if hosted in its_window._layers else "others")
        fetch(hosted, link)

    monkeypatch.setattr(HostedParameters, "fetch", fetch_and_note)
    part(torch.tensor([1, 2])).backward()
    assert fetched == ["others", 0, 1, 2, 3, 4, 5, 3, 2, 1, 0]
    assert [one.on_device for one in its_window._layers] == [True] * 2 + [False] * 4  # for the next forward pass


def test_a_pass_without_gradients_leaves_no_layer() -> None:
    part = Part()
    its_window = windowed(part, 2)
    assert its_window.device_bytes == 0
    with torch.no_grad():
        part(torch.tensor([1]))
    assert not any(one.on_device for one in its_window._layers)
    assert its_window.device_bytes == OTHER_BYTES
    its_window.release()
    assert its_window.device_bytes == 0
