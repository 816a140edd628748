"""Replicas compute the same as their homes, and their gradients arrive there before hooks run: exact in float64."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig

from bytescale_ext.plan.experts.placement import PARTS, PlacementPlan, home_parts
from megatron.bytescale.core.transformer.moe.slot_experts import Exchange, SlotExperts, grouped_pass
from tests.harness import run_ranks

HIDDEN, RANKS, EXPERTS, SLOTS = 6, 3, 6, 4


def shared_plan() -> PlacementPlan:
    """Return the plan: rank 1 has replicas of experts 0 and 5, rank 2 of expert 0, rank 0 none."""
    parts = home_parts(EXPERTS, RANKS)
    parts[:, 0] = [PARTS - 24, 12, 12]
    parts[:, 5] = [0, 512, 512]
    return PlacementPlan.of(parts, SLOTS)


class Expert(torch.nn.Module):
    """Experts with two matrices of different shapes and a bias, with the interface of Megatron's experts."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.up = torch.nn.Linear(HIDDEN, 5, bias=False, dtype=torch.float64)
        self.down = torch.nn.Linear(5, HIDDEN, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.down(self.up(tokens).tanh()) * probs[:, None], None


class Stack(torch.nn.Module):
    """Part of Megatron's module that the slots use."""

    def __init__(self, rank: int, exchange: Exchange | None) -> None:
        super().__init__()
        self.local_experts = torch.nn.ModuleList([Expert(2 * rank), Expert(2 * rank + 1)])
        self.exchange = exchange
        self.stacks: list[torch.Tensor] = []

    before_reading = fetched = None
    is_grouped = False
    config = SimpleNamespace(moe_apply_probs_on_input=False)
    forward = SlotExperts.forward
    fetch = SlotExperts.fetch
    forget = SlotExperts.forget
    homes = SlotExperts.homes


def inputs(rank: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Return tokens per slot, tokens and probabilities of a rank. Replica 5 of rank 1 gets no token."""
    sizes = [[3, 0, 0, 0], [2, 1, 4, 0], [0, 2, 5, 0]][rank]
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = torch.randn(sum(sizes), HIDDEN, dtype=torch.float64, generator=generator)
    return sizes, tokens.requires_grad_(), torch.rand(sum(sizes), dtype=torch.float64, generator=generator)


def in_slots(rank: int, world: int) -> tuple[Any, ...]:
    """Return the output of a rank and the gradients of tokens and weights, recorded by a hook of each parameter."""
    stack = Stack(rank, Exchange(shared_plan(), torch.distributed.group.WORLD))
    seen: dict[str, torch.Tensor] = {}

    def note(name: str, parameter: torch.Tensor) -> None:
        assert name not in seen, "a hook has run before the gradient was whole"
        seen[name] = parameter.grad.clone()  # type: ignore[union-attr]

    for name, parameter in stack.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(note, name))
    sizes, tokens, probs = inputs(rank)
    output, _ = stack(tokens, torch.tensor(sizes), probs)
    output.square().sum().backward()
    assert tokens.grad is not None
    return output.detach(), tokens.grad, seen, dict(zip(shared_plan().slots[rank], sizes, strict=False))


@pytest.mark.ranks
def test_gradients_are_those_of_one_process() -> None:
    found = run_ranks(in_slots, RANKS)
    experts = [Expert(number) for number in range(EXPERTS)]
    for rank, (output, gradient, _, _) in enumerate(found):
        sizes, tokens, probs = inputs(rank)
        held = [expert for expert in shared_plan().slots[rank] if expert >= 0]
        parts = zip(held, tokens.split(sizes), probs.split(sizes), strict=False)
        expected = torch.cat([experts[expert](*part)[0] for expert, *part in parts])
        expected.square().sum().backward()
        assert torch.allclose(output, expected, rtol=0, atol=1e-12)
        assert torch.allclose(gradient, tokens.grad, rtol=0, atol=1e-12)
    for rank, (_, _, seen, _) in enumerate(found):
        for home in range(2):
            for name, parameter in experts[2 * rank + home].named_parameters():
                hooked = seen[f"local_experts.{home}.{name}"]
                assert torch.allclose(hooked, parameter.grad, rtol=0, atol=1e-10), f"{name} of expert {2 * rank + home}"


def two_passes(rank: int, world: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    """Run two micro-batches before their backward passes; return outputs, gradients of weights, and collectives."""
    stack, calls = Stack(rank, Exchange(shared_plan(), torch.distributed.group.WORLD)), []
    works = torch.distributed.all_to_all_single

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append("exchange")
        return works(*args, **kwargs)

    torch.distributed.all_to_all_single = noted
    stack.before_reading = lambda: calls.append("gathered")  # type: ignore[assignment]
    stack.fetch()
    stack.fetch()
    calls.append("begun")
    sizes, tokens, probs = inputs(rank)
    passes = [stack(scale * tokens, torch.tensor(sizes), probs)[0] for scale in (1.0, 3.0)]
    calls.append("forward")
    for output in passes:
        output.square().sum().backward()
    gradients = [one.grad for one in stack.parameters() if one.grad is not None]
    return [one.detach() for one in passes], gradients, calls


@pytest.mark.ranks
def test_weights_travel_once_in_a_step() -> None:
    """Each micro-batch has its own gradients, although both use the same weights."""
    found = run_ranks(two_passes, RANKS)
    experts = [Expert(number) for number in range(EXPERTS)]
    for rank, (outputs, _, calls) in enumerate(found):
        assert calls == ["gathered", "exchange", "begun", "forward", "exchange", "exchange"]
        sizes, tokens, probs = inputs(rank)
        held = [expert for expert in shared_plan().slots[rank] if expert >= 0]
        for scale, output in zip((1.0, 3.0), outputs, strict=True):
            parts = zip(held, (scale * tokens).split(sizes), probs.split(sizes), strict=False)
            expected = torch.cat([experts[expert](*part)[0] for expert, *part in parts])
            expected.square().sum().backward()
            assert torch.allclose(output, expected, rtol=0, atol=1e-12)
    for rank, (_, gradients, _) in enumerate(found):
        expected_gradients = [one.grad for home in range(2) for one in experts[2 * rank + home].parameters()]
        for mine, expected in zip(gradients, expected_gradients, strict=True):
            assert torch.allclose(mine, expected, rtol=0, atol=1e-10)


class Linear(torch.nn.Module):
    """Fake of Megatron's linear layer of an expert, without bias and communication."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, columns) / 4)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tokens @ self.weight.t(), None


class MegatronExpert(torch.nn.Module):
    """Fake of Megatron's MLP on plain matrices."""

    forward = MLP.forward

    def __init__(self, config: TransformerConfig, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.config, self.activation_func = config, config.activation_func
        self.linear_fc1 = Linear(32 if config.gated_linear_unit else 16, 8)
        self.linear_fc2 = Linear(8, 16)


def config_of(activation: Any = torch.nn.functional.silu, **settings: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=8, ffn_hidden_size=16, num_attention_heads=1, add_bias_linear=False,
        activation_func=activation, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        config_of(gated_linear_unit=True, bias_activation_fusion=True),
        config_of(gated_linear_unit=True, activation_func_clamp_value=0.5, glu_linear_offset=1.0),
        config_of(torch.nn.functional.gelu),
    ],
    ids=["fused swiglu", "clamped", "gelu"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_single_experts(config: TransformerConfig, dtype: torch.dtype) -> None:
    experts = [MegatronExpert(config, number).to(dtype) for number in range(4)]
    sizes = torch.tensor([3, 0, 5, 2])
    torch.manual_seed(9)
    tokens, probs = torch.randn(10, 8, dtype=dtype), torch.rand(10)
    found = []
    for is_grouped in (False, True):
        given = tokens.clone().requires_grad_()
        for one in experts:
            one.zero_grad()
        if is_grouped:
            output = grouped_pass(experts[0], [list(one.parameters()) for one in experts], sizes, given, probs, [])
        else:
            parts = zip(experts, given.split(sizes.tolist()), probs.split(sizes.tolist()), strict=True)
            output = torch.cat([one(*part)[0] for one, *part in parts])
        output.sum().backward()  # a gradient that is a view of other memory
        of_weights = [torch.zeros(()) if one.grad is None else one.grad for x in experts for one in x.parameters()]
        found.append([output.detach(), given.grad, *of_weights])
    far = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for one_by_one, grouped in zip(*found, strict=True):
        assert torch.allclose(grouped, one_by_one, rtol=far, atol=far)
        assert grouped.dtype == one_by_one.dtype


def grouped_slots(rank: int, world: int) -> list[list[torch.Tensor]]:
    """Return outputs and gradients of homes, slot by slot and in grouped products, with replicas on some ranks."""
    config, found = config_of(gated_linear_unit=True), []
    sizes, _, probs = inputs(rank)
    tokens = torch.randn(sum(sizes), 8, generator=torch.Generator().manual_seed(rank))
    for is_grouped in (False, True):
        stack = Stack(rank, Exchange(shared_plan(), torch.distributed.group.WORLD))
        stack.local_experts = torch.nn.ModuleList([MegatronExpert(config, 2 * rank + home) for home in range(2)])
        stack.is_grouped = is_grouped
        output, _ = stack(tokens, torch.tensor(sizes), probs.float())
        output.square().sum().backward()
        found.append([output.detach(), *(one.grad for one in stack.parameters() if one.grad is not None)])
    return found


@pytest.mark.ranks
def test_grouped_products_reach_replicas() -> None:
    for one_by_one, grouped in run_ranks(grouped_slots, RANKS):
        assert len(one_by_one) == len(grouped) == 5
        for mine, other in zip(one_by_one, grouped, strict=True):
            assert torch.allclose(mine, other, rtol=1e-5, atol=1e-5)


def test_micro_batches_in_flight_share_the_stacked_weights() -> None:
    """Three passes keep one stack of each linear layer; a step later, the stacks hold the new weights."""
    stack, config = Stack(0, None), config_of(gated_linear_unit=True)
    stack.local_experts = torch.nn.ModuleList([MegatronExpert(config, seed) for seed in (7, 8)])
    stack.is_grouped = True
    gathered: list[int] = []
    stack.before_reading = lambda: gathered.append(len(stack.stacks))  # type: ignore[assignment]
    sizes, tokens, probs = torch.tensor([2, 3]), torch.randn(5, 8, requires_grad=True), torch.rand(5)
    for step in range(2):
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            if tensor.dim() == 3:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = [stack(scale * tokens, sizes, probs)[0] for scale in (1.0, 2.0, 3.0)]
        assert sum(saved.values()) == sum(weight.nbytes for weight in stack.parameters())
        for output in outputs:
            output.sum().backward()
        parts = zip(stack.local_experts, tokens.split([2, 3]), probs.split([2, 3]), strict=True)
        expected = torch.cat([expert(*part)[0] for expert, *part in parts])
        assert torch.allclose(outputs[0], expected, atol=1e-6)
        gradients = [weight.grad.clone() for weight in stack.parameters()]
        stack.zero_grad()
        for scale in (1.0, 2.0, 3.0):
            parts = zip(stack.local_experts, (scale * tokens).split([2, 3]), probs.split([2, 3]), strict=True)
            torch.cat([expert(*part)[0] for expert, *part in parts]).sum().backward()
        for weight, gradient in zip(stack.parameters(), gradients, strict=True):
            assert torch.allclose(weight.grad, gradient, rtol=1e-4, atol=1e-5)
        stack.zero_grad()
        assert gathered == [0] * (step + 1), "weights are read once, after they are gathered"
        stack.forget()
        with torch.no_grad():
            for weight in stack.parameters():
                weight.mul_(1.5)


def test_experts_of_other_modules_become_local_modules() -> None:
    """TransformerEngine's grouped or single experts are replaced by modules whose weights can be sent."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from bytescale_ext.plan.experts.placement import home_parts
    from megatron.bytescale.core.transformer.moe.counted_layer import CountedMoELayer
    from megatron.bytescale.core.transformer.moe.placed_layer import PlacedMoELayer, Placements, with_slots

    placements = Placements(PlacementPlan.of(home_parts(EXPERTS, RANKS), SLOTS))
    own: Any = MLPSubmodules(ColumnParallelLinear, Linear)
    others: list[Any] = [
        partial(TEGroupedMLP, submodules=GroupedMLPSubmodules(linear_fc1=Linear, linear_fc2=Linear)),
        partial(SequentialMLP, submodules=MLPSubmodules(Linear, Linear)),
    ]
    for experts in (*others, partial(SequentialMLP, submodules=own)):
        layer = partial(CountedMoELayer, submodules=MoESubmodules(experts=experts))
        spec = ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(mlp=layer))
        mlp: Any = with_slots(spec, placements).submodules.mlp
        assert mlp.func is PlacedMoELayer
        found = mlp.keywords["submodules"].experts
        assert found.func is SlotExperts
        assert found.keywords["submodules"].linear_fc1 is ColumnParallelLinear
        assert (found.keywords["submodules"] is own) == (experts.keywords["submodules"] is own)
