"""Experts in slots: those whose home this rank is, and replicas with weights that come from home.

Weights travel in the forward pass of each micro-batch, gradients back in its backward pass. So a replica has no
parameters, and the gradient of a home parameter is whole before any of its hooks runs: gradient buffers, sharded
optimizers and checkpoints know nothing of replicas. Weights of replicas stay until the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.func import functional_call

from bytescale_ext.plan.experts.placement import EMPTY, PlacementPlan

Weights = Sequence[torch.Tensor]
"""The parameters of one expert, or their gradients, in the order of its module."""


class Exchange:
    """Who sends the weights of which expert to whom, for one plan and one rank.

    Attributes:
        group: the ranks that share the experts.
        sent: by target rank, the home slots whose weights go there.
        received: by source rank, the replicas whose weights come from there.
        num_homes: experts whose home this rank is.
        num_replicas: on this rank.
    """

    def __init__(self, plan: PlacementPlan, group: torch.distributed.ProcessGroup) -> None:
        rank = group.rank()
        self.group, self.num_homes = group, plan.num_experts // plan.num_ranks
        replicas = [[expert for expert in experts[self.num_homes :] if expert != EMPTY] for experts in plan.slots]
        self.num_replicas = len(replicas[rank])
        self.sent = [[one % self.num_homes for one in there if one // self.num_homes == rank] for there in replicas]
        self.received = [
            [place for place, one in enumerate(replicas[rank]) if one // self.num_homes == source]
            for source in range(plan.num_ranks)
        ]

    def to_replicas(self, homes: Sequence[Weights]) -> list[list[torch.Tensor]]:
        """Return the weights of each replica on this rank, of any shapes, from those of each home. Collective."""
        return self._travel(homes, homes[0], self.sent, self.received, self.num_replicas)

    def to_homes(self, replicas: Sequence[Weights], like: Weights) -> list[list[torch.Tensor]]:
        """Return the sum of the gradients of all replicas of each home, from those of each replica. Collective.

        ``like``: the weights of one expert, for their shapes.
        """
        return self._travel(replicas, like, self.received, self.sent, self.num_homes)

    def _travel(
        self, given: Sequence[Weights], like: Weights, sent: list[list[int]], received: list[list[int]], count: int
    ) -> list[list[torch.Tensor]]:
        sizes = [one.numel() for one in like]
        flat = [one.reshape(-1) for places in sent for place in places for one in given[place]]
        arrived = like[0].new_empty(sum(sizes) * sum(map(len, received)))
        torch.distributed.all_to_all_single(
            arrived,
            torch.cat(flat) if flat else like[0].new_empty(0),
            [sum(sizes) * len(places) for places in received],
            [sum(sizes) * len(places) for places in sent],
            group=self.group,
        )
        sums = like[0].new_zeros(count, sum(sizes))
        places = [place for of_rank in received for place in of_rank]
        for place, part in zip(places, arrived.view(-1, sum(sizes)), strict=True):
            sums[place] += part
        return [[part.view_as(one) for part, one in zip(row.split(sizes), like, strict=True)] for row in sums]


class _Ctx(torch.autograd.function.FunctionCtx):
    exchange: Exchange
    num_weights: int
    saved_tensors: tuple[torch.Tensor, ...]


class ShareWeights(torch.autograd.Function):
    """Tokens and the weights of homes -> the same tokens and the weights of replicas.

    Tokens pass through so that every rank takes part in the exchange of gradients, and at the same place of its
    backward pass, whether it has replicas or not.
    """

    @staticmethod
    def forward(
        ctx: _Ctx, exchange: Exchange, tokens: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return tokens [tokens, hidden] and the weights of each replica, one after the other."""
        ctx.exchange, ctx.num_weights = exchange, len(weights) // exchange.num_homes
        ctx.save_for_backward(*weights[: ctx.num_weights])
        replicas = exchange.to_replicas(_of_experts(weights, ctx.num_weights))
        return tokens.view_as(tokens), *(one for of_expert in replicas for one in of_expert)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Ctx, tokens: torch.Tensor, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of tokens [tokens, hidden] and homes."""
        homes = ctx.exchange.to_homes(_of_experts(gradients, ctx.num_weights), ctx.saved_tensors)
        return None, tokens, *(one for of_expert in homes for one in of_expert)


def _of_experts(flat: Weights, count: int) -> list[Weights]:
    """Return the weights of each expert, ``count`` of them, from those of all."""
    return [flat[first : first + count] for first in range(0, len(flat), count)]


class SlotExperts(SequentialMLP):
    """Megatron's experts one by one, with replicas behind them.

    Attributes:
        exchange: of the plan that runs, or None without replicas; the layer sets it.
    """

    exchange: Exchange | None = None

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Compute the tokens [tokens, hidden] of all slots on this rank, slot by slot; return [tokens, hidden].

        Args:
            permuted_local_hidden_states: [tokens, hidden], ordered by slots.
            tokens_per_expert: [slots] of this rank.
            permuted_probs: [tokens].
        """
        tokens = permuted_local_hidden_states
        modules: list[Any] = list(self.local_experts)
        replicas: list[Weights] = []
        if self.exchange is not None:
            weights = [one for expert in self.local_experts for one in expert.parameters()]
            names = [name for name, _ in modules[0].named_parameters()]
            tokens, *flat = ShareWeights.apply(self.exchange, tokens, *weights)
            replicas = _of_experts(flat, len(names))
        sizes = tokens_per_expert.tolist()
        parts = list(zip(tokens.split(sizes), permuted_probs.split(sizes), strict=True))
        outputs = [expert(*part)[0] for expert, part in zip(modules, parts, strict=False)]
        for replica, part in zip(replicas, parts[len(modules) :], strict=False):
            outputs.append(functional_call(modules[0], dict(zip(names, replica, strict=True)), part)[0])
        return torch.cat(outputs), None
