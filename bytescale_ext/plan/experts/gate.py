"""Gates that start dense and become sparse: their temperature is a function of the step (DTS-Gate, Nie et al. 2021).

In "EvoMoE: An Evolutional Mixture-of-Experts Training Framework via Dense-To-Sparse Gate" a softmax of high temperature
gives each token to all experts. As the temperature falls, scores below a threshold are dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

EXP: Final = "exp"
LINEAR: Final = "linear"
SCHEDULES: Final = (EXP, LINEAR)
TOPK: Final = "topk"
TOP1: Final = "top1"
FINALS: Final = (TOPK, TOP1)
"""Routers that a gate ends as."""


@dataclass(frozen=True)
class DenseToSparse:
    """How a gate anneals.

    Attributes:
        high, low: temperature of the first step, and the one that it falls to.
        schedule: one of ``SCHEDULES``.
        steps: after so many the router is Megatron's.
        threshold: experts with a smaller score are dropped.
        most_experts: of a token.
        noise_seed: of the noise on logits; None: there is none.
    """

    high: float
    low: float
    schedule: str
    steps: int
    threshold: float
    most_experts: int
    noise_seed: int | None = None

    def temperature(self, step: int) -> float | None:
        """Return the temperature of a step, which are counted from 0; None once the router is Megatron's."""
        if step >= self.steps:
            return None
        share = step / self.steps
        if self.schedule == EXP:
            return self.high * math.pow(self.low / self.high, share)
        return self.high + (self.low - self.high) * share
