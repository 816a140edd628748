"""A frozen model: no graph, zeros as gradients between stages, and the state of heads that a checkpoint lacks."""

from __future__ import annotations

from typing import Any

import torch

from megatron.bytescale.core.models.gpt.trunk import Trunk, begin_as_last_layer, without_heads


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.final_layernorm = torch.nn.LayerNorm(3)
        self.input_tensor: torch.Tensor | None = None

    def set_input_tensor(self, tensor: torch.Tensor) -> None:
        self.input_tensor = tensor

    def forward(self, x: torch.Tensor | None) -> Any:
        x = self.input_tensor if x is None else x
        assert x is not None
        for layer in self.layers:
            x = x * layer.weight
        return self.final_layernorm(x)


class Chunk(torch.nn.Module):
    def __init__(self, pre_process: bool) -> None:
        super().__init__()
        self.pre_process, self.decoder = pre_process, Decoder()

    def forward(self, x: torch.Tensor | None) -> Any:
        return self.decoder(x) * 1


def test_nothing_is_recorded_and_a_stage_sends_zeros_back() -> None:
    first, later = Chunk(True), Chunk(False)
    trunks = [Trunk(first), Trunk(later)]
    assert not any(parameter.requires_grad for chunk in (first, later) for parameter in chunk.parameters())
    sent = first(torch.ones(2, 3))
    assert not sent.requires_grad
    source = sent.detach().requires_grad_()
    later.decoder.set_input_tensor(source)
    out = later(None)
    assert out._base is None
    assert later.decoder.input_tensor is not source
    out.backward(torch.ones_like(out))
    assert source.grad is not None
    assert not source.grad.any()
    assert all(trunk.hidden is trunk.source is None for trunk in trunks)  # nothing is held between passes


def test_the_states_before_the_last_norm_are_noted() -> None:
    chunk = Chunk(True)
    trunk, seen = Trunk(chunk), []
    chunk.decoder.final_layernorm.register_forward_hook(lambda *_: seen.append(trunk.hidden))
    chunk(torch.ones(1, 3))
    wanted = chunk.decoder.layers[0].weight * chunk.decoder.layers[1].weight  # type: ignore[operator]
    assert torch.equal(seen[0], wanted[None])


def with_heads() -> Chunk:
    chunk, heads = Chunk(True), torch.nn.Module()
    for name, part in (("layer0", Layer()), ("norm", torch.nn.LayerNorm(3)), ("first", torch.nn.Linear(3, 3))):
        heads.add_module(name, part)
    chunk.add_module("draft_heads", heads)
    return chunk


def test_a_checkpoint_without_heads_starts_them() -> None:
    chunk, donor = with_heads(), Chunk(True)
    donor.decoder.final_layernorm.weight.data.fill_(5)
    first = chunk.get_parameter("draft_heads.first.weight").detach().clone()
    chunk.register_load_state_dict_pre_hook(begin_as_last_layer)
    chunk.load_state_dict(donor.state_dict())
    assert torch.equal(chunk.get_parameter("draft_heads.layer0.weight"), donor.decoder.layers[1].weight)  # type: ignore
    assert chunk.get_parameter("draft_heads.norm.weight").tolist() == [5, 5, 5]
    assert torch.equal(chunk.get_parameter("draft_heads.first.weight"), first)


def test_a_checkpoint_with_heads_is_left_as_it_is() -> None:
    chunk, state = with_heads(), with_heads().state_dict()
    before = {name: value.clone() for name, value in state.items()}
    begin_as_last_layer(chunk, state, "")
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_heads_are_hidden_for_a_while() -> None:
    chunk = with_heads()
    with without_heads(chunk):
        assert not any("draft_heads" in name for name in chunk.state_dict())
    assert "draft_heads.first.weight" in chunk.state_dict()
    with without_heads(Chunk(True)):
        pass
