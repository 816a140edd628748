"""Experts in slots: those whose home this rank is, and replicas with weights that come from home.

Weights travel once in a step, while other layers compute, and stay until it ends. Gradients go back in the backward
pass of each micro-batch. So a replica has no parameters, and the gradient of a home parameter is whole before any of
its hooks runs: gradient buffers, sharded optimizers and checkpoints know nothing of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.func import functional_call

from bytescale_ext.plan.experts.placement import EMPTY, PlacementPlan

Weights = Sequence[torch.Tensor]
"""The parameters of one expert, or their gradients, in the order of its module."""


@dataclass
class Fetch:
    """Weights of the replicas on this rank, on their way or there.

    Attributes:
        work: the transfer; None once it has ended.
        sent: kept until then.
        arrived: [numbers] of all replicas in the order of their arrival.
        places: the replica of each part of ``arrived``.
        like: the weights of one expert, for their shapes.
    """

    work: torch.distributed.Work | None
    sent: torch.Tensor | None
    arrived: torch.Tensor
    places: list[int]
    like: Weights

    def weights(self) -> list[list[torch.Tensor]]:
        """Wait until they are there, and return the weights of each replica, [any shape] as in its expert."""
        if self.work is not None:
            self.work.wait()
            self.work = self.sent = None
        rows = dict(zip(self.places, self.arrived.view(len(self.places), -1), strict=True)) if self.places else {}
        return [_in_shapes(rows[place], self.like) for place in range(len(rows))]


class Exchange:
    """Who sends the weights of which expert to whom, for one plan and one rank.

    Attributes:
        group: the ranks that share the experts.
        weights_group: the same ranks, with a communicator for weights alone, so that tokens do not wait for them.
        sent: by target rank, the home slots whose weights go there.
        received: by source rank, the replicas whose weights come from there.
        num_homes: experts whose home this rank is.
        num_replicas: on this rank.
    """

    def __init__(
        self,
        plan: PlacementPlan,
        group: torch.distributed.ProcessGroup,
        weights_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        rank = group.rank()
        self.weights_group = weights_group or group
        self.group, self.num_homes = group, plan.num_experts // plan.num_ranks
        replicas = [[expert for expert in experts[self.num_homes :] if expert != EMPTY] for experts in plan.slots]
        self.num_replicas = len(replicas[rank])
        self.sent = [[one % self.num_homes for one in there if one // self.num_homes == rank] for there in replicas]
        self.received = [
            [place for place, one in enumerate(replicas[rank]) if one // self.num_homes == source]
            for source in range(plan.num_ranks)
        ]

    def to_replicas(self, homes: Sequence[Weights]) -> Fetch:
        """Send the weights of each home, of any shapes, to its replicas, and do not wait. Collective.

        All ranks start the exchanges of their layers in the same order.
        """
        with torch.no_grad():
            detached = [[one.detach() for one in home] for home in homes]
            arrived, sent, work = self._start(detached, detached[0], self.sent, self.received, self.weights_group)
        return Fetch(work, sent, arrived, [place for of_rank in self.received for place in of_rank], detached[0])

    def to_homes(self, replicas: Sequence[Weights], like: Weights) -> list[list[torch.Tensor]]:
        """Return the sum of the gradients of all replicas of each home, from those of each replica. Collective.

        ``like``: the weights of one expert, for their shapes.
        """
        arrived, _, work = self._start(replicas, like, self.received, self.sent, self.group)
        work.wait()
        size = sum(one.numel() for one in like)
        sums = like[0].new_zeros(self.num_homes, size)
        places = [place for of_rank in self.sent for place in of_rank]
        for place, part in zip(places, arrived.view(-1, size), strict=True):
            sums[place] += part
        return [_in_shapes(row, like) for row in sums]

    @staticmethod
    def _start(
        given: Sequence[Weights],
        like: Weights,
        sent: list[list[int]],
        received: list[list[int]],
        group: torch.distributed.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.distributed.Work]:
        """Start an all-to-all; return what will have arrived [numbers], what is sent, and the work."""
        size = sum(one.numel() for one in like)
        flat = [one.reshape(-1) for places in sent for place in places for one in given[place]]
        arrived = like[0].new_empty(size * sum(map(len, received)))
        leaves = torch.cat(flat) if flat else like[0].new_empty(0)
        come, go = ([size * len(places) for places in of] for of in (received, sent))
        work = torch.distributed.all_to_all_single(arrived, leaves, come, go, group=group, async_op=True)
        assert work is not None, "this process is in the group"
        return arrived, leaves, work


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
        ctx: _Ctx, exchange: Exchange, replicas: list[list[torch.Tensor]], tokens: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return tokens [tokens, hidden] and the weights of each replica, one after the other, as new tensors."""
        ctx.exchange, ctx.num_weights = exchange, len(weights) // exchange.num_homes
        ctx.save_for_backward(*weights[: ctx.num_weights])
        return tokens.view_as(tokens), *(one.detach() for of_expert in replicas for one in of_expert)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Ctx, tokens: torch.Tensor, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of tokens [tokens, hidden] and homes."""
        homes = ctx.exchange.to_homes(_of_experts(gradients, ctx.num_weights), ctx.saved_tensors)
        return None, None, tokens, *(one for of_expert in homes for one in of_expert)


def _in_shapes(row: torch.Tensor, like: Weights) -> list[torch.Tensor]:
    """Return the numbers [n] of an expert in the shapes of its weights."""
    parts = row.split([one.numel() for one in like])
    return [part.view_as(one) for part, one in zip(parts, like, strict=True)]


def _of_experts(flat: Weights, count: int) -> list[Weights]:
    """Return the weights of each expert, ``count`` of them, from those of all."""
    return [flat[first : first + count] for first in range(0, len(flat), count)]


class GroupedLinear(torch.nn.Module):
    """One matrix for each slot, all in one grouped product; stands where an expert has a linear layer without bias."""

    def __init__(self, weights: torch.Tensor, ends: torch.Tensor) -> None:
        """Take weights [slots, out, in], and where the tokens of each slot end, int32 [slots]."""
        super().__init__()
        self.weights, self.ends = weights, ends

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return [tokens, out] of tokens [tokens, in], ordered by slots, and no bias."""
        output = torch.nn.functional.grouped_mm(tokens, self.weights.transpose(1, 2), offs=self.ends)
        if output.requires_grad:
            output.register_hook(torch.Tensor.contiguous)  # the product's backward pass takes no other layout
        return output, None


def grouped_pass(
    expert: MLP, experts: Sequence[Weights], sizes: torch.Tensor, tokens: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    """Return what experts make of tokens, [tokens, hidden], with one product for each of their two linear layers.

    Megatron's own pass of an expert runs between them, so each of its activations works.

    Args:
        expert: Megatron's module of one, without biases.
        experts: both weights of each slot: [out, in] each.
        sizes: tokens of each slot: [slots].
        tokens: [tokens, hidden], ordered by slots.
        probs: [tokens].
    """
    ends = sizes[: len(experts)].cumsum(0).to(tokens.device, torch.int32)
    first, second = (GroupedLinear(torch.stack(weights), ends) for weights in zip(*experts, strict=True))
    grouped = SimpleNamespace(
        config=expert.config, activation_func=expert.activation_func, linear_fc1=first, linear_fc2=second
    )
    return MLP.forward(cast(MLP, grouped), tokens, probs)[0]


class SlotExperts(SequentialMLP):
    """Megatron's experts one by one or in grouped products, with replicas behind them.

    Attributes:
        is_grouped: slots are computed together (``--moe-grouped-gemm``).
        exchange: of the plan that runs, or None without replicas; the layer sets it.
        fetched: weights of replicas, from the start of their transfer to the end of the step.
        before_reading: is called before weights of homes are sent, and waits until the optimizer's update is in them.
    """

    is_grouped: bool = False
    exchange: Exchange | None = None
    fetched: Fetch | None = None
    before_reading: Callable[[], None] | None = None

    @property
    def homes(self) -> list[list[torch.Tensor]]:
        """The weights of each home, of any shapes."""
        return [list(expert.parameters()) for expert in self.local_experts]

    def fetch(self) -> None:
        """Start the transfer of the weights of replicas, once in a step. Collective on the ranks that share experts."""
        if self.exchange is None or self.fetched is not None:
            return
        if self.before_reading is not None:
            self.before_reading()
        self.fetched = self.exchange.to_replicas(self.homes)

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Compute the tokens [tokens, hidden] of all slots on this rank; return [tokens, hidden].

        Args:
            permuted_local_hidden_states: [tokens, hidden], ordered by slots.
            tokens_per_expert: [slots] of this rank.
            permuted_probs: [tokens].
        """
        tokens = permuted_local_hidden_states
        modules: list[MLP] = list(self.local_experts)
        replicas: list[Weights] = []
        if self.exchange is not None:
            self.fetch()
            assert self.fetched is not None
            weights = (one for home in self.homes for one in home)
            names = [name for name, _ in modules[0].named_parameters()]
            tokens, *flat = ShareWeights.apply(self.exchange, self.fetched.weights(), tokens, *weights)
            replicas = _of_experts(flat, len(names))
        if self.is_grouped and len(tokens):
            return grouped_pass(modules[0], [*self.homes, *replicas], tokens_per_expert, tokens, permuted_probs), None
        sizes = tokens_per_expert.tolist()
        parts = list(zip(tokens.split(sizes), permuted_probs.split(sizes), strict=True))
        outputs = [expert(*part)[0] for expert, part in zip(modules, parts, strict=False)]
        for replica, part in zip(replicas, parts[len(modules) :], strict=False):
            outputs.append(functional_call(modules[0], dict(zip(names, replica, strict=True)), part)[0])
        return torch.cat(outputs), None
