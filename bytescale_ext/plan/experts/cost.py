"""What a placement costs: computing, four exchanges of tokens, and the weights and gradients of replicas.

The cost model is FlexMoE's (Nie et al. 2023) for the slowest rank, with two changes that follow from homes: only tokens
that leave their rank are exchanged, and weights travel from home to each replica once in a step and gradients back with
each micro-batch, in place of an all-reduce over equal copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from bytescale_ext.plan.cost.model_shape import BACKWARD_PER_FORWARD, ModelShape
from bytescale_ext.plan.experts.placement import Bools, Floats, Ints, homes_of, tokens_of_ranks

EXCHANGES: Final = 4
"""Tokens travel to their experts and back, in the forward and in the backward pass."""


@dataclass(frozen=True)
class ExpertCost:
    """The constants of one layer of experts.

    Attributes:
        token_seconds: of one token in one expert, forward and backward.
        exchange_seconds: of one token on the link of a rank, one way.
        copy_seconds: of the weights or gradients of one expert on the link of a rank, in a step: half of both ways.
    """

    token_seconds: float
    exchange_seconds: float
    copy_seconds: float

    @classmethod
    def of(cls, shape: ModelShape, flops: float, link_bytes: float, micro_batches: int = 1) -> ExpertCost:
        """Return the constants of a model in 16 bits: 2 FLOPs forward per weight (Narayanan et al. 2021, appendix).

        Args:
            shape: with experts.
            flops: that a rank computes in a second.
            link_bytes: that a rank sends in a second.
            micro_batches: of a step; gradients of replicas travel with each.
        """
        one_micro_batch = cls._of_one(shape, flops, link_bytes)
        return one_micro_batch.with_micro_batches(micro_batches)

    def with_micro_batches(self, count: float) -> ExpertCost:
        """Return the cost of steps of so many micro-batches, from that of one: weights travel once in any case."""
        return replace(self, copy_seconds=self.copy_seconds * (1 + count) / 2)

    @classmethod
    def _of_one(cls, shape: ModelShape, flops: float, link_bytes: float) -> ExpertCost:
        inner = (shape.expert_ffn_hidden - shape.shared_ffn_hidden) // shape.experts_per_token
        weights = (3 if shape.gated else 2) * shape.hidden * inner
        return cls(
            token_seconds=2 * weights * (1 + BACKWARD_PER_FORWARD) / flops,
            exchange_seconds=2 * shape.hidden / link_bytes,
            copy_seconds=2 * weights / link_bytes,
        )


def rank_seconds(tokens: Floats | Ints, held: Bools, loads: Ints, cost: ExpertCost) -> Floats:
    """Return the seconds of each rank: [ranks].

    Args:
        tokens: [ranks, experts] that each rank computes.
        held: [ranks, experts] which replicas a rank holds; homes are not marked.
        loads: [ranks, experts] tokens of each rank for each expert.
        cost: of the layer.
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
    """Return the tokens of the busiest rank over the mean; 1 without tokens. Both arrays: [ranks, experts]."""
    tokens = tokens_of_ranks(parts, loads.sum(0)).sum(1)
    return float(tokens.max() / tokens.mean()) if tokens.any() else 1.0
