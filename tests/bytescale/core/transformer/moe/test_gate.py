"""Gate: all experts at high temperature, few at low temperature, and no effect after annealing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state

from bytescale_ext.plan.experts.gate import DenseToSparse
from megatron.bytescale.core.transformer.moe.gate import Gate, annealed
from megatron.bytescale.core.transformer.token_noise import gumbel_noise, numbers_of_samples

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


def test_experts_of_tokens_are_counted() -> None:
    gate = Gate(PLAN)
    gate.note(torch.ones(4, EXPERTS, dtype=torch.bool))
    gate.note(torch.zeros(4, EXPERTS, dtype=torch.bool))
    gate.note(torch.ones(4, EXPERTS, dtype=torch.bool), torch.tensor([False, True, True, True]))
    assert gate.take_active() == (5 * EXPERTS, 9), "padding is left out"
    assert gate.take_active() == (0, 0)


class Top1(torch.nn.Module):
    """Fake of Megatron's router."""

    config = SimpleNamespace(num_layers=4)
    layer_number = 1
    is_mtp_layer = False

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
    assert gate.take_active() == (50 * EXPERTS, 50)
    router.eval()
    router.routing(rows)
    assert gate.num_tokens == 0, "evaluations are not counted"
    assert scores.shape == (50, EXPERTS)


def test_what_hangs_on_megatrons_scores_gets_its_gradient() -> None:
    """Megatron attaches auxiliary losses to the returned scores. The gate adds nothing else."""
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


def test_noise_is_for_training_alone() -> None:
    gate = Gate(replace(PLAN, noise_seed=5), 3, 1.0, numbers_of_samples(0, 2, range(25)))
    router = annealed(Top1, gate)()  # type: ignore[arg-type]
    router.layer_number = 1
    rows = logits().view(25, 2, EXPERTS)
    noisy, _ = router.routing(rows)
    again, _ = router.routing(rows)
    assert torch.equal(noisy, again)
    expected, _ = gate.gates(logits() + gumbel_noise(gate.tokens.reshape(-1), EXPERTS, (5, 3, 1)), 1.0)  # type: ignore[union-attr]
    assert torch.allclose(noisy, expected)
    for layer, is_later, step in ((2, False, 3), (1, True, 3), (1, False, 4)):
        router.layer_number, router.is_mtp_layer, gate.step = layer, is_later, step
        assert not torch.allclose(noisy, router.routing(rows)[0])
    router.eval()
    plain, _ = gate.gates(logits(), 1.0)
    assert torch.equal(router.routing(rows)[0], plain)


def test_a_rank_has_the_noise_of_its_part_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(replace(PLAN, noise_seed=5), 3, 1.0, numbers_of_samples(0, 2, range(8)))
    whole = gate.noise(1, torch.Size((8, 2, EXPERTS)))
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    part = gate.noise(1, torch.Size((4, 2, EXPERTS)))
    assert torch.equal(part, whole[8:])  # type: ignore[index,arg-type]
