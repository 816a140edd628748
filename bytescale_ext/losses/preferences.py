"""Losses of pairs of answers, as functions of the log-probabilities of whole answers.

A first pass sums the log-probability of each answer. The derivative of a pair's loss by these sums is the weight of
each token in a second pass, whose gradient is then the gradient of the loss (chain rule).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import logsigmoid

SIMPO_MARGIN: Final = 0.5
"""Target margin of SimPO relative to beta, gamma / beta (Meng et al. 2024, section 3.2)."""


@dataclass(frozen=True)
class Answers:
    """Both answers of each pair; column 0 is the preferred one.

    Attributes:
        sums: log-probability of each answer: float64 [pairs, 2].
        counts: tokens of each answer: [pairs, 2].
        reference: log-probability of each answer under the reference model, [pairs, 2]; 0 without one.
    """

    sums: torch.Tensor
    counts: torch.Tensor
    reference: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Mean log-probability of a token of each answer: [pairs, 2]."""
        return self.sums / self.counts

    @property
    def margins(self) -> torch.Tensor:
        """Margin of the preferred answer over the other, both relative to the reference model: [pairs]."""
        ratios = self.sums - self.reference
        return ratios[:, 0] - ratios[:, 1]


def _dpo(answers: Answers, beta: float) -> torch.Tensor:
    return -logsigmoid(beta * answers.margins)


def _ipo(answers: Answers, beta: float) -> torch.Tensor:
    return (answers.margins - 0.5 / beta) ** 2


def _simpo(answers: Answers, beta: float) -> torch.Tensor:
    means = answers.means
    return -logsigmoid(beta * (means[:, 0] - means[:, 1] - SIMPO_MARGIN))


def _orpo(answers: Answers, beta: float) -> torch.Tensor:
    means = answers.means
    log_odds = means - torch.log(-torch.expm1(means.clamp(max=-1e-12)))
    return -means[:, 0] - beta * logsigmoid(log_odds[:, 0] - log_odds[:, 1])


@dataclass(frozen=True)
class LossRow:
    """One loss.

    Attributes:
        name: name, as ``--loss`` takes it.
        beta: default of its coefficient.
        needs_reference: whether it compares with a reference model.
        of: function of answers and beta that returns the loss of each pair: [pairs].
    """

    name: str
    beta: float
    needs_reference: bool
    of: Callable[[Answers, float], torch.Tensor]


LOSSES: Final = (
    LossRow("dpo", 0.1, True, _dpo),  # Rafailov et al. 2023, Eq. 7
    LossRow("ipo", 0.1, True, _ipo),  # Azar et al. 2023, Eq. 17
    LossRow("simpo", 2.0, False, _simpo),  # Meng et al. 2024, Eq. 6
    LossRow("orpo", 0.1, False, _orpo),  # Hong et al. 2024, Eq. 6 and 7
)


def loss_row(name: str) -> LossRow:
    """Return the loss of this name. Raises ValueError with all names if there is none."""
    for row in LOSSES:
        if row.name == name:
            return row
    raise ValueError(f"loss {name!r} is unknown; choose one of {', '.join(row.name for row in LOSSES)}")


def weigh(row: LossRow, beta: float, answers: Answers) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each pair, [pairs], and the weight of the loss of each token of each answer, [pairs, 2].

    The loss of a token is minus its log-probability, so the weight is minus the derivative of the pair's loss by the
    log-probability of the answer.
    """
    with torch.enable_grad():
        sums = answers.sums.detach().double().requires_grad_()
        losses = row.of(Answers(sums, answers.counts, answers.reference), beta)
        (derivative,) = torch.autograd.grad(losses.sum(), sums)
    return losses.detach(), -derivative
