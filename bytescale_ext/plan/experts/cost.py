"""Cost of a placement: computation, four token exchanges, and transfers of replicas' weights and gradients.

This is the cost model of FlexMoE (Nie et al. 2023) for the slowest rank, with two changes because experts have homes:

- Only tokens that leave their rank are exchanged.
- Weights are sent from the home to each replica once a step, and gradients are sent back in each micro-batch. FlexMoE
  all-reduces over equal copies instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from bytescale_ext.plan.cost.model_shape import BACKWARD_PER_FORWARD, ModelShape
from bytescale_ext.plan.experts.placement import Bools, Floats, Ints, homes_of, tokens_of_ranks

EXCHANGES: Final = 4
"""Number of token exchanges: to the experts and back, in the forward pass and in the backward pass."""


@dataclass(frozen=True)
class ExpertCost:
    """Cost constants of one layer of experts.

    Attributes:
        token_seconds: seconds to compute one token in one expert, forward and backward.
        exchange_seconds: seconds to send one token over the link of a rank.
        copy_seconds: half of the seconds to send the weights of one expert to a replica and its gradients back, over
            the link of a rank, in one step.
    """

    token_seconds: float
    exchange_seconds: float
    copy_seconds: float

    @classmethod
    def of(cls, shape: ModelShape, flops: float, link_bytes: float, micro_batches: int = 1) -> ExpertCost:
        """Return the constants of a 16-bit model, with 2 forward FLOPs per weight (Narayanan et al. 2021, appendix).

        Args:
            shape: sizes of a model with experts.
            flops: FLOPs per second of a rank.
            link_bytes: bytes per second that a rank sends.
            micro_batches: number of micro-batches of a step. Gradients of replicas are sent in each micro-batch.
        """
        one_micro_batch = cls._of_one(shape, flops, link_bytes)
        return one_micro_batch.with_micro_batches(micro_batches)

    def with_micro_batches(self, count: float) -> ExpertCost:
        """Return the cost of a step of ``count`` micro-batches, given the cost of a step of one micro-batch.

        Gradients are sent in every micro-batch, but weights only once a step.
        """
        return replace(self, copy_seconds=self.copy_seconds * (1 + count) / 2)

    @classmethod
    def _of_one(cls, shape: ModelShape, flops: float, link_bytes: float) -> ExpertCost:
        inner = int(shape.expert_width)
        weights = shape.mlp_matrices * shape.token_width * inner
        return cls(
            token_seconds=2 * weights * (1 + BACKWARD_PER_FORWARD) / flops,
            exchange_seconds=2 * shape.token_width / link_bytes,
            copy_seconds=2 * weights / link_bytes,
        )


def rank_seconds(tokens: Floats | Ints, held: Bools, loads: Ints, cost: ExpertCost) -> Floats:
    """Return the seconds of each rank: [ranks].

    Args:
        tokens: tokens of each expert that each rank computes, [ranks, experts].
        held: whether a rank has a replica of an expert, [ranks, experts]; False for homes.
        loads: tokens of each rank for each expert, [ranks, experts].
        cost: cost constants of the layer.
    """
    sent = np.maximum(loads - tokens, 0).sum(1)
    received = np.maximum(tokens - loads, 0).sum(1)
    copies_sent = homes_of(held.shape[1], held.shape[0]) @ held.sum(0)
    exchanged, copied = np.maximum(sent, received), np.maximum(copies_sent, held.sum(1))
    seconds: Floats = (
        cost.token_seconds * tokens.sum(1)
        + EXCHANGES * cost.exchange_seconds * exchanged
        + 2 * cost.copy_seconds * copied
    )
    return seconds


def step_seconds(parts: Ints, loads: Ints, cost: ExpertCost) -> float:
    """Return the seconds of the slowest rank. ``parts`` and ``loads``: [ranks, experts]."""
    held = (parts > 0) & ~homes_of(parts.shape[1], parts.shape[0])
    return float(rank_seconds(tokens_of_ranks(parts, loads.sum(0)), held, loads, cost).max())


def balance_ratio(parts: Ints, loads: Ints) -> float:
    """Return the tokens of the busiest rank over the mean, or 1 without tokens. Both arrays: [ranks, experts]."""
    tokens = tokens_of_ranks(parts, loads.sum(0)).sum(1)
    return float(tokens.max() / tokens.mean()) if tokens.any() else 1.0
