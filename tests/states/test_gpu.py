"""Model states in host memory, with a GPU: gradients, pages and the window of layers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.states.adam import PagedAdam, PagedParameter
from bytescale_ext.states.gradients import GradientSums
from bytescale_ext.states.node_memory import host_block
from bytescale_ext.states.window import LayerWindow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def test_gradients_are_added_while_the_device_computes() -> None:
    """A gradient's memory is reused as soon as its copy has been waited for."""
    sums = GradientSums(1 << 16, on_cuda=True)
    total, expected = host_block(300_000, torch.float32, pinned=True), torch.zeros(300_000, device=CUDA)
    generator = torch.Generator(CUDA).manual_seed(0)
    for _ in range(10):
        gradient = torch.randn(300_000, generator=generator, device=CUDA).bfloat16()
        expected.add_(gradient)
        sums.add(total, gradient)
        del gradient
    sums.finish()
    assert torch.equal(total, expected.cpu())


@pytest.mark.parametrize("stage", [1, 2])
def test_pages_update_as_torch_does(stage: int) -> None:
    torch.manual_seed(1)
    shapes = ((50, 30), (1,), (400, 7))
    start = [torch.randn(shape, device=CUDA).bfloat16() for shape in shapes]
    resident = [one.float().requires_grad_() for one in start]
    plain = torch.optim.AdamW(resident, lr=1e-2)
    model = [one.clone() for one in start]
    copies = [one.float().cpu().requires_grad_() for one in start]
    optimizer = torch.optim.AdamW(copies, lr=1e-2)
    pairs = [PagedParameter(one, target.view(-1)) for one, target in zip(copies, model, strict=True)]
    paged = PagedAdam(optimizer, pairs, StateConfig(4096, math.inf, stage=stage), on_cuda=True)
    for _ in range(4):
        gradients = [torch.randn(shape, device=CUDA) for shape in shapes]
        for one, gradient in zip(resident, gradients, strict=True):
            one.grad = gradient.clone()
        plain.step()
        paged.begin_step()
        for one, gradient in zip(copies, gradients, strict=True):
            one.grad = gradient if stage == 1 else gradient.cpu()
        optimizer.step()
    for one, target in zip(resident, model, strict=True):
        torch.testing.assert_close(target.float(), one.detach(), rtol=1e-2, atol=1e-3)


class Part(nn.Module):
    """Six layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the sum of squares of the last layer's output, a scalar; ``hidden``: [n, 64]."""
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.square().sum()


@pytest.mark.parametrize("num_layers", [1, 2])
def test_layers_run_in_a_window_on_the_device(num_layers: int) -> None:
    torch.manual_seed(2)
    hosted = Part()
    plain = copy.deepcopy(hosted).to(CUDA)
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in hosted.named_parameters():
        block = host_block(parameter.numel(), torch.float32, pinned=True).view(parameter.shape)
        parameter.data = block.copy_(parameter.data)

        def take(parameter: torch.Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            gradients[name], parameter.grad = parameter.grad, None

        parameter.register_post_accumulate_grad_hook(take)
    window = LayerWindow(hosted, list(hosted.layers), set(hosted.parameters()), num_layers, CUDA)
    for _ in range(3):
        hidden = torch.randn(128, 64, device=CUDA)
        plain.zero_grad()
        loss = plain(hidden)
        loss.backward()
        found = hosted(hidden)
        found.backward()
        window.release()
        assert torch.equal(found, loss)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(gradients[name], parameter.grad), name
        assert window.device_bytes == 0
