"""What the gate makes of logits: all experts when hot, few when cold, and nothing of its own once it has annealed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter

from bytescale_ext.plan.experts.gate import DenseToSparse
from megatron.bytescale.core.transformer.moe.counted_layer import TokenCounts, with_counts
from megatron.bytescale.core.transformer.moe.gate import Gate, GatedMoELayer, annealed, with_gate
from tests.bytescale.core.transformer.moe.test_counted_layer import layer_spec

EXPERTS = 8
PLAN = DenseToSparse(2.0, 0.3, "exp", 10, 1e-3, EXPERTS)


def logits(scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(50, EXPERTS, generator=torch.Generator().manual_seed(0))


def test_a_hot_gate_is_the_dense_weighted_sum() -> None:
    outputs = torch.randn(EXPERTS, 5)
    scores, chosen = Gate(PLAN).gates(logits(), 1e6)
    assert chosen.all()
    assert torch.allclose(scores @ outputs, outputs.mean(0).expand(50, 5), atol=1e-5)
    warm, _ = Gate(PLAN).gates(logits(), 5.0)
    assert torch.allclose(warm, torch.softmax(logits() / 5.0, -1))


def test_colder_gates_choose_fewer_experts() -> None:
    means = []
    for temperature in (100.0, 2.0, 1.0, 0.5, 0.2, 0.01):
        scores, chosen = Gate(PLAN).gates(logits(), temperature)
        assert torch.equal(scores > 0, chosen)
        assert chosen.any(-1).all()
        assert (scores.sum(-1) > 1 - EXPERTS * PLAN.threshold).all()
        means.append(float(chosen.sum(-1).float().mean()))
    assert means == sorted(means, reverse=True)
    assert means[0] == EXPERTS
    assert means[-1] < 1.1


def test_the_most_experts_of_a_token() -> None:
    scores, chosen = Gate(replace(PLAN, most_experts=3)).gates(logits(0.1), 1.0)
    assert (chosen.sum(-1) == 3).all()
    dense = torch.softmax(logits(0.1), -1)
    assert torch.equal(scores.max(-1).values, dense.max(-1).values)
    assert (dense[chosen].view(50, 3).min(-1).values >= dense.masked_fill(chosen, 0.0).max(-1).values).all()


def test_the_mean_of_active_experts() -> None:
    gate = Gate(PLAN)
    gate.note(torch.ones(4, EXPERTS, dtype=torch.bool))
    gate.note(torch.zeros(4, EXPERTS, dtype=torch.bool))
    assert gate.take_mean_active() == EXPERTS / 2
    assert gate.take_mean_active() == 0


class Top1(torch.nn.Module):
    """Stands for Megatron's router."""

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat = logits.view(-1, EXPERTS)
        chosen = flat == flat.max(-1, keepdim=True).values
        return flat.softmax(-1) * chosen, chosen


def test_the_router_is_megatrons_once_the_gate_has_annealed() -> None:
    gate = Gate(PLAN)
    router = annealed(Top1, gate)()  # type: ignore[arg-type]
    rows = logits().view(25, 2, EXPERTS)
    for mine, megatrons in zip(router.routing(rows), Top1().routing(rows), strict=True):
        assert torch.equal(mine, megatrons)
    gate.temperature = 1e6
    scores, chosen = router.routing(rows)
    assert chosen.all()
    assert gate.take_mean_active() == EXPERTS
    router.eval()
    router.routing(rows)
    assert gate.num_tokens == 0, "evaluations are not counted"
    assert scores.shape == (50, EXPERTS)


def test_what_hangs_on_megatrons_scores_gets_its_gradient() -> None:
    """Megatron attaches auxiliary losses to the scores that it returns; these add nothing else."""
    seen = []

    class Losses(Top1):
        def routing(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores, chosen = super().routing(*args)
            scores.register_hook(seen.append)
            return scores, chosen

    gate = Gate(PLAN, temperature=1.5)
    rows = logits().view(25, 2, EXPERTS).requires_grad_()
    scores, _ = annealed(Losses, gate)().routing(rows)  # type: ignore[arg-type]
    (scores * torch.arange(EXPERTS)).sum().backward()
    assert len(seen) == 1
    assert not seen[0].any()
    alone = logits().requires_grad_()
    (gate.gates(alone, 1.5)[0] * torch.arange(EXPERTS)).sum().backward()
    assert torch.allclose(rows.grad.view(-1, EXPERTS), alone.grad)  # type: ignore[union-attr]


@pytest.mark.parametrize("router", [TopKRouter, partial(TopKRouter, is_mtp_layer=False)])
def test_layers_that_count_get_the_gate(router: object) -> None:
    modules = MoESubmodules(experts="experts", router=router)  # type: ignore[arg-type]
    spec, gate = layer_spec(partial(MoELayer, submodules=modules)), Gate(PLAN)
    with_gate(with_counts(spec, TokenCounts()), gate)
    mlp = spec.submodules.mlp
    assert mlp.func is GatedMoELayer
    assert mlp.keywords["gate"] is gate
    assert issubclass(mlp.keywords["submodules"].router.func, TopKRouter)
    assert modules.router is router


def test_layers_that_do_not_count_get_it_too() -> None:
    modules = MoESubmodules(experts="experts", router=TopKRouter)  # type: ignore[arg-type]
    mlp = with_gate(layer_spec(partial(MoELayer, submodules=modules)), Gate(PLAN)).submodules.mlp
    assert mlp.func is GatedMoELayer
    assert "counts" not in mlp.keywords
