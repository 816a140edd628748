"""Loss of recorded rollouts: the clipped ratio of a policy to the policy that wrote them (GRPO, Shao et al. 2024).

The loss of a token depends on the token's own log-probability alone. So a step has one pass, and the sum over tokens is
divided over ranks, slices and micro-batches like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

NAME: Final = "grpo"


@dataclass(frozen=True)
class PolicyLoss:
    """Coefficients of the loss.

    Attributes:
        beta: coefficient of the divergence from the reference model; 0 without one.
        low, high: the ratio counts from 1 - ``low`` to 1 + ``high``.
    """

    beta: float = 0.04
    low: float = 0.2
    high: float = 0.2


@dataclass(frozen=True)
class TokenLosses:
    """Losses of tokens, and figures of the log: [n] each.

    Attributes:
        losses: loss of each token, with a gradient.
        divergences: estimate of the divergence from the reference model, 0 without one.
        clipped: 1 for tokens whose ratio is cut, so that their advantage has no gradient; else 0.
    """

    losses: torch.Tensor
    divergences: torch.Tensor
    clipped: torch.Tensor


def policy_losses(loss: PolicyLoss, logprobs: torch.Tensor, numbers: torch.Tensor) -> TokenLosses:
    """Return the losses of tokens (Shao et al. 2024, Eq. 3, and Eq. 4 for the divergence).

    Args:
        loss: coefficients.
        logprobs: log-probability of each token: [n].
        numbers: old log-probability, advantage and reference log-probability of each token: [n, 3].
    """
    numbers = numbers.to(logprobs.dtype)
    old, advantages, references = numbers.unbind(dim=1)
    ratios = torch.exp(logprobs - old)
    limited = torch.clamp(ratios, 1 - loss.low, 1 + loss.high)
    gains = torch.minimum(ratios * advantages, limited * advantages)
    with torch.no_grad():
        clipped = (limited * advantages < ratios * advantages).to(logprobs.dtype)
    if loss.beta == 0:
        return TokenLosses(-gains, torch.zeros_like(clipped), clipped)
    distances = references - logprobs
    divergences = torch.exp(distances) - distances - 1
    return TokenLosses(loss.beta * divergences - gains, divergences.detach(), clipped)
