"""Temperature of gates that start dense and become sparse during training (DTS-Gate, Nie et al. 2021).

In "EvoMoE: An Evolutional Mixture-of-Experts Training Framework via Dense-To-Sparse Gate" a softmax with a high
temperature sends each token to all experts. As the temperature falls, scores below a threshold are dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

EXP: Final = "exp"
LINEAR: Final = "linear"
SCHEDULES: Final = (EXP, LINEAR)


@dataclass(frozen=True)
class DenseToSparse:
    """Annealing schedule of a gate.

    Attributes:
        high: temperature of the first step.
        low: final temperature.
        schedule: one of ``SCHEDULES``.
        steps: number of annealing steps, after which Megatron's router takes over.
        threshold: smallest score of an expert that a token is sent to.
        most_experts: largest number of experts of a token.
        noise_seed: seed of the noise on logits; None means no noise.
    """

    high: float
    low: float
    schedule: str
    steps: int
    threshold: float
    most_experts: int
    noise_seed: int | None = None

    def temperature(self, step: int) -> float | None:
        """Return the temperature of a step, or None once Megatron's router takes over. Steps are counted from 0."""
        if step >= self.steps:
            return None
        share = step / self.steps
        if self.schedule == EXP:
            return self.high * math.pow(self.low / self.high, share)
        return self.high + (self.low - self.high) * share
