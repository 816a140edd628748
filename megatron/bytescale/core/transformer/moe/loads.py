"""Loads of experts across the slices of a micro-batch, and the auxiliary loss of the whole micro-batch.

For T tokens, E experts and k experts per token, the loss is (Fedus et al. 2022, "Switch Transformers", equations 4 to
6; ``switch_load_balancing_loss_func`` of Megatron)::

    L = E / (k T^2) sum_i n_i sum_x p_i(x)        n_i: tokens that choose expert i, a constant; p_i(x): scores

It is linear in the scores, so the gradient of p_i(x) is E n_i / (k T^2), the same for all tokens of the micro-batch.
n_i and T are sums over the micro-batch's slices. A schedule of slices runs all forward passes of a micro-batch before
its first backward pass, on each stage and chunk, so the sums are complete when the first gradient is computed. So a
slice only records its loads in its forward pass and computes the gradient in its backward pass. A sum of per-slice
losses would be another loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bytescale_ext.plan.schedule.actions import Action


class SliceLoad(NamedTuple):
    """One router's loads from one slice.

    Attributes:
        tokens: number of tokens per column, from all ranks that share the micro-batch, [columns]; a column is an
            expert, or a pair (sample, expert).
        scores: sum of this rank's scores per column, [columns].
        num_tokens: number of tokens on all ranks that share the micro-batch; if columns are pairs, in one sample.
        num_local_tokens: number of tokens on this rank.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    num_tokens: torch.Tensor | int
    num_local_tokens: torch.Tensor | int


@dataclass
class LayerLoads:
    """The loads of one router, from all slices of one micro-batch that have run so far.

    Attributes:
        slices: slice index -> loads. A recomputation writes equal values again.
        is_recorded: whether the log contains the micro-batch's loss.
    """

    slices: dict[int, SliceLoad] = field(default_factory=dict)
    is_recorded: bool = False

    def total(self) -> SliceLoad:
        """Return the sum of the loads of all slices."""
        tokens, scores, num_tokens, num_local_tokens = zip(*self.slices.values(), strict=True)
        return SliceLoad(sum(tokens[1:], tokens[0]), sum(scores[1:], scores[0]), sum(num_tokens), sum(num_local_tokens))


@dataclass
class ExpertLoads:
    """The loads of all of a process's routers in one step of slices.

    Attributes:
        num_slices: number of slices per micro-batch.
        action: current pass, including its recomputation.
        unfinished: (micro-batch, model chunk) -> ((router, depth), kind of loss) -> loads.
    """

    num_slices: int
    action: Action | None = None
    unfinished: dict[tuple[int, int], dict[tuple[object, str], LayerLoads]] = field(default_factory=dict)

    def note(self, router: tuple[object, int], kind: str, load: SliceLoad) -> LayerLoads:
        """Store a router's loads at a depth from the current slice; return the loads of its micro-batch so far."""
        action = self.action
        assert action is not None
        of_micro_batch = self.unfinished.setdefault((action.micro_batch, action.chunk), {})
        loads = of_micro_batch.setdefault((router, kind), LayerLoads())
        loads.slices[action.slice_index] = load
        return loads

    def is_last(self) -> bool:
        """Return whether the current slice is the last slice of its micro-batch."""
        return self.action is not None and self.action.slice_index == self.num_slices - 1

    def release(self, action: Action) -> None:
        """Delete the loads of a micro-batch after its backward passes."""
        self.unfinished.pop((action.micro_batch, action.chunk), None)


def balance_loss(load: SliceLoad, num_experts: int, topk: int) -> torch.Tensor:
    """Return the loss L, a scalar; if ranks share a micro-batch, this rank's part of it."""
    return (balance_gradient(load, num_experts, topk) * load.scores).sum()


def balance_gradient(load: SliceLoad, num_experts: int, topk: int) -> torch.Tensor:
    """Return the gradient of L with respect to any token's scores, [columns]; 0 without tokens."""
    num_tokens = torch.as_tensor(load.num_tokens, dtype=load.scores.dtype, device=load.scores.device).clamp(min=1)
    return load.tokens.to(load.scores.dtype) * (num_experts / (topk * num_tokens * num_tokens))


class _Ctx(torch.autograd.function.FunctionCtx):
    shape: torch.Size
    make: Callable[[], torch.Tensor]


class GradientOfScores(torch.autograd.Function):
    """A scalar placeholder for the loss: 0 in the forward pass; the gradient is made in the backward pass."""

    @staticmethod
    def forward(ctx: _Ctx, scores: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return 0.

        Args:
            ctx: torch's context.
            scores: scores of each token, [tokens, columns].
            make: returns their gradient, [columns] if it is the same for all tokens, or [tokens, columns].
        """
        ctx.shape, ctx.make = scores.shape, make
        return scores.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Ctx, scale: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient [tokens, columns] of the scores, multiplied by ``scale``, a scalar."""
        return (ctx.make() * scale).expand(ctx.shape), None
