"""Experts in slots: home experts of this rank, and replicas, which receive their weights from their homes.

Weights are transferred once per step, while other layers compute, and stay until the step ends. Gradients return in the
backward pass of each micro-batch. So a replica has no parameters, and the gradient of a home parameter is complete
before any of its hooks runs. Gradient buffers, sharded optimizers and checkpoints need no knowledge of replicas.
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

from bytescale_ext.parallel.upload import upload
from bytescale_ext.plan.experts.placement import EMPTY, PlacementPlan

Weights = Sequence[torch.Tensor]
"""Parameters of one expert, or their gradients, in the order of its module."""


@dataclass
class Fetch:
    """The weights of this rank's replicas, in transfer or complete.

    Attributes:
        work: transfer in progress; None once it has ended.
        sent: send buffer, kept until the transfer ends.
        arrived: weights of all replicas in order of arrival, flat, [numbers].
        places: index of the replica in each part of ``arrived``.
        like: weights of one expert, for their shapes.
    """

    work: torch.distributed.Work | None
    sent: torch.Tensor | None
    arrived: torch.Tensor
    places: list[int]
    like: Weights

    def weights(self) -> list[list[torch.Tensor]]:
        """Wait for the transfer, and return the weights of each replica, in the shapes of its expert's."""
        if self.work is not None:
            self.work.wait()
            self.work = self.sent = None
        rows = dict(zip(self.places, self.arrived.view(len(self.places), -1), strict=True)) if self.places else {}
        return [_in_shapes(rows[place], self.like) for place in range(len(rows))]


class Exchange:
    """The transfers of weights between homes and replicas, for one plan and one rank.

    Attributes:
        group: ranks that share the experts.
        weights_group: group of the same ranks only for weights, so that tokens do not wait for weights.
        sent: home slots to send, by target rank.
        received: replicas to receive, by source rank.
        num_homes: number of home experts on this rank.
        num_replicas: number of replicas on this rank.
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
        self.sent = [
            [expert % self.num_homes for expert in there if expert // self.num_homes == rank] for there in replicas
        ]
        self.received = [
            [place for place, expert in enumerate(replicas[rank]) if expert // self.num_homes == source]
            for source in range(plan.num_ranks)
        ]

    def to_replicas(self, homes: Sequence[Weights]) -> Fetch:
        """Start to send the weights of each home, of any shapes, to its replicas. Collective.

        All ranks start the exchanges of their layers in the same order.
        """
        with torch.no_grad():
            detached = [[weight.detach() for weight in home] for home in homes]
            arrived, sent, work = self._start(detached, detached[0], self.sent, self.received, self.weights_group)
        return Fetch(work, sent, arrived, [place for of_rank in self.received for place in of_rank], detached[0])

    def to_homes(self, replicas: Sequence[Weights], like: Weights) -> list[list[torch.Tensor]]:
        """Exchange the replicas' gradients and return their sum for each home on this rank. Collective.

        ``like``: weights of one expert, for their shapes.
        """
        arrived, _, work = self._start(replicas, like, self.received, self.sent, self.group)
        work.wait()
        size = sum(weight.numel() for weight in like)
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
        """Start an all-to-all; return the receive buffer [numbers], the send buffer, and the work."""
        size = sum(weight.numel() for weight in like)
        flat = [weight.reshape(-1) for places in sent for place in places for weight in given[place]]
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
    """Maps tokens and the weights of homes to the same tokens and the weights of replicas.

    Tokens pass through so that every rank, with or without replicas, takes part in the exchange of gradients at the
    same point of its backward pass.
    """

    @staticmethod
    def forward(
        ctx: _Ctx, exchange: Exchange, replicas: list[list[torch.Tensor]], tokens: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return tokens [tokens, hidden] and the weights of each replica, in sequence, as new tensors."""
        ctx.exchange, ctx.num_weights = exchange, len(weights) // exchange.num_homes
        ctx.save_for_backward(*weights[: ctx.num_weights])
        return tokens.view_as(tokens), *(weight.detach() for of_expert in replicas for weight in of_expert)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Ctx, tokens: torch.Tensor, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of tokens [tokens, hidden] and home weights."""
        homes = ctx.exchange.to_homes(_of_experts(gradients, ctx.num_weights), ctx.saved_tensors)
        return None, None, tokens, *(gradient for of_expert in homes for gradient in of_expert)


def _in_shapes(row: torch.Tensor, like: Weights) -> list[torch.Tensor]:
    """Split an expert's flat numbers [n] into tensors with the shapes of its weights."""
    parts = row.split([weight.numel() for weight in like])
    return [part.view_as(weight) for part, weight in zip(parts, like, strict=True)]


def _of_experts(flat: Weights, count: int) -> list[Weights]:
    """Split the weights of ``count`` experts into the weights of each expert."""
    return [flat[first : first + count] for first in range(0, len(flat), count)]


class GroupedLinear(torch.nn.Module):
    """One matrix per slot, multiplied in one grouped product; replaces an expert's linear layer without bias."""

    def __init__(self, weights: torch.Tensor, ends: torch.Tensor) -> None:
        """Store weights [slots, out, in] and the end of each slot's tokens, int32 [slots]."""
        super().__init__()
        self.weights, self.ends = weights, ends

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the output [tokens, out] of tokens [tokens, in] in slot order, and None as bias."""
        output = torch.nn.functional.grouped_mm(tokens, self.weights.transpose(1, 2), offs=self.ends)
        if output.requires_grad:
            output.register_hook(torch.Tensor.contiguous)  # the backward pass needs contiguous gradients
        return output, None


class SharedStack(torch.autograd.Function):
    """Maps matrices to their stack, which exists already: all micro-batches in flight keep the same memory."""

    @staticmethod
    def forward(ctx: object, stack: torch.Tensor, *matrices: torch.Tensor) -> torch.Tensor:
        """Return the stack [slots, out, in] of matrices [out, in] as a new tensor on the same memory."""
        return stack.view_as(stack)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of each matrix from the gradient of the stack [slots, out, in]."""
        return None, *gradient.unbind()


def grouped_pass(
    expert: MLP,
    experts: Sequence[Weights],
    sizes: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    stacks: list[torch.Tensor],
) -> torch.Tensor:
    """Return the experts' output for tokens, [tokens, hidden], with one product for each of their two linear layers.

    Megatron's own forward pass of an expert runs around the products, so all its activation functions work.

    Args:
        expert: Megatron's module of one expert, without biases.
        experts: both weights of each slot, [out, in] each.
        sizes: number of tokens of each slot, [slots].
        tokens: hidden states [tokens, hidden] in slot order.
        probs: probability of each token, [tokens].
        stacks: the weights of all slots by linear layer, each [slots, out, in]; filled if it is empty.
    """
    ends = upload(sizes[: len(experts)].cumsum(0, dtype=torch.int32), tokens.device)
    by_layer = list(zip(*experts, strict=True))
    if not stacks:
        stacks += [torch.stack(matrices).detach() for matrices in by_layer]
    first, second = (
        GroupedLinear(SharedStack.apply(stack, *matrices), ends)
        for stack, matrices in zip(stacks, by_layer, strict=True)
    )
    grouped = SimpleNamespace(
        config=expert.config, activation_func=expert.activation_func, linear_fc1=first, linear_fc2=second
    )
    return MLP.forward(cast(MLP, grouped), tokens, probs)[0]


class SlotExperts(SequentialMLP):
    """Megatron's experts, one by one or in grouped products, followed by replicas.

    Attributes:
        is_grouped: whether slots are computed together (``--moe-grouped-gemm``).
        exchange: transfers of the current plan, set by the layer; None without replicas.
        fetched: weights of replicas, from the start of their transfer to the end of the step.
        stacks: weights for grouped products, from the first micro-batch to the end of the step; else empty.
        before_reading: called before home weights are sent; it waits for the optimizer's update of them.
    """

    is_grouped: bool = False
    exchange: Exchange | None = None
    fetched: Fetch | None = None
    before_reading: Callable[[], None] | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.stacks: list[torch.Tensor] = []

    @property
    def homes(self) -> list[list[torch.Tensor]]:
        """The weights of each home expert, of any shapes."""
        return [list(expert.parameters()) for expert in self.local_experts]

    def fetch(self) -> None:
        """Start the transfer of replica weights, once per step. Collective on the ranks that share experts."""
        if self.exchange is None or self.fetched is not None:
            return
        if self.before_reading is not None:
            self.before_reading()
        self.fetched = self.exchange.to_replicas(self.homes)

    def forget(self) -> None:
        """Drop weights of replicas and of grouped products."""
        self.fetched = None
        self.stacks = []

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Compute the tokens [tokens, hidden] of all slots on this rank; return [tokens, hidden].

        Args:
            permuted_local_hidden_states: hidden states [tokens, hidden] in slot order.
            tokens_per_expert: number of tokens of each slot on this rank, [slots].
            permuted_probs: probability of each token, [tokens].
        """
        tokens = permuted_local_hidden_states
        if self.config.moe_apply_probs_on_input:
            tokens = (tokens * permuted_probs[:, None]).to(tokens.dtype)
            permuted_probs = torch.ones_like(permuted_probs)
        modules: list[MLP] = list(self.local_experts)
        replicas: list[Weights] = []
        if self.exchange is not None:
            self.fetch()
            assert self.fetched is not None
            weights = (weight for home in self.homes for weight in home)
            names = [name for name, _ in modules[0].named_parameters()]
            tokens, *flat = ShareWeights.apply(self.exchange, self.fetched.weights(), tokens, *weights)
            replicas = _of_experts(flat, len(names))
        if self.is_grouped and len(tokens):
            if not self.stacks and self.before_reading is not None:
                self.before_reading()
            slots = [*self.homes, *replicas]
            return grouped_pass(modules[0], slots, tokens_per_expert, tokens, permuted_probs, self.stacks), None
        sizes = tokens_per_expert.tolist()
        parts = list(zip(tokens.split(sizes), permuted_probs.split(sizes), strict=True))
        outputs = [expert(*part)[0] for expert, part in zip(modules, parts, strict=False)]
        for replica, part in zip(replicas, parts[len(modules) :], strict=False):
            outputs.append(functional_call(modules[0], dict(zip(names, replica, strict=True)), part)[0])
        return torch.cat(outputs), None
