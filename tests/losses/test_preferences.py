"""Losses of pairs: values by their definitions, and gradients of two passes in float64."""

from __future__ import annotations

import math

import pytest
import torch

from bytescale_ext.losses.preferences import LOSSES, SIMPO_MARGIN, Answers, LossRow, loss_row, weigh
from megatron.bytescale.features.preferences import PAIR_NAMES


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


def by_definition(name: str, beta: float, logps: list[float], counts: list[int], reference: list[float]) -> float:
    """Return the loss of one pair in plain Python."""
    (chosen, rejected), (of_chosen, of_rejected) = logps, reference
    margin = (chosen - of_chosen) - (rejected - of_rejected)
    means = [logp / count for logp, count in zip(logps, counts, strict=True)]
    if name == "dpo":
        return -math.log(sigmoid(beta * margin))
    if name == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    if name == "simpo":
        return -math.log(sigmoid(beta * means[0] - beta * means[1] - beta * SIMPO_MARGIN))
    odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in means]
    return -means[0] - beta * math.log(sigmoid(math.log(odds[0] / odds[1])))


@pytest.mark.parametrize("row", LOSSES, ids=lambda row: row.name)
def test_losses_are_those_of_the_papers(row: LossRow) -> None:
    sums, counts, reference = [[-7.0, -5.0], [-3.0, -11.0]], [[4, 3], [2, 9]], [[-6.0, -6.5], [-4.0, -9.0]]
    answers = Answers(*(torch.tensor(part, dtype=torch.float64) for part in (sums, counts, reference)))
    losses, _ = weigh(row, row.beta, answers)
    wanted = [by_definition(row.name, row.beta, *pair) for pair in zip(sums, counts, reference, strict=True)]
    assert losses.tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("row", LOSSES, ids=lambda row: row.name)
def test_two_passes_have_the_gradient_of_one_process(row: LossRow) -> None:
    """A model of one matrix: the gradient through the pairs' loss equals the gradient of weighted token losses."""
    torch.manual_seed(1)
    weight = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    lengths, reference = [[5, 3], [1, 8], [4, 4]], torch.randn(3, 2, dtype=torch.float64) - 9.0
    inputs = [[torch.randn(length, 6, dtype=torch.float64) for length in pair] for pair in lengths]
    labels = [[torch.randint(0, 11, (length,)) for length in pair] for pair in lengths]

    def token_losses(pair: int, answer: int) -> torch.Tensor:
        logits = inputs[pair][answer] @ weight
        return torch.nn.functional.cross_entropy(logits, labels[pair][answer], reduction="none")

    sums = torch.stack([torch.stack([-token_losses(pair, answer).sum() for answer in (0, 1)]) for pair in range(3)])
    counts = torch.tensor(lengths, dtype=torch.float64)
    whole = row.of(Answers(sums, counts, reference), row.beta).sum()
    (wanted,) = torch.autograd.grad(whole, weight, retain_graph=True)
    losses, weights = weigh(row, row.beta, Answers(sums.detach(), counts, reference))
    assert float(losses.sum()) == pytest.approx(float(whole.detach()), rel=1e-12)
    second = sum(weights[pair, answer] * token_losses(pair, answer).sum() for pair in range(3) for answer in (0, 1))
    assert isinstance(second, torch.Tensor)
    (found,) = torch.autograd.grad(second, weight)
    assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)


def test_the_flag_names_each_loss() -> None:
    assert tuple(row.name for row in LOSSES) == PAIR_NAMES


def test_an_unknown_loss_names_the_known() -> None:
    with pytest.raises(ValueError, match="loss 'kto' is unknown; choose one of dpo, ipo, simpo, orpo"):
        loss_row("kto")
