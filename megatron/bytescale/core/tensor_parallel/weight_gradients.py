"""Linear layers whose weight gradients are computed after the backward pass (zero bubble, Qi et al. 2023, section 2).

The layers are Megatron's, with another matrix product. The product's backward pass returns the input gradient and
stores the inputs of the weight gradient, which the schedule computes later. Under sequence parallelism a layer saves
only its own rows of the input, as in Megatron, so the gather that Megatron makes in the backward pass is also
postponed.

Shapes: inputs [rows, b, in], this rank's rows under sequence parallelism; weights [out, in]; output gradients [all
rows, b, out].
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from bytescale_ext.plan.schedule.actions import Action

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime


@dataclass(frozen=True, eq=False)
class Product:
    """The settings of one linear layer's product.

    Attributes:
        weight: parameter [out, in].
        group: tensor-parallel group that sums the ranks' input gradients, or None.
        shares_rows: whether each rank of the group has a share of the input's rows (sequence parallelism).
        gradients: receiver of the weight gradient.
    """

    weight: torch.nn.Parameter
    group: dist.ProcessGroup | None
    shares_rows: bool
    gradients: WeightGradients

    def all_rows(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the input's rows from all ranks, [all rows, b, in]."""
        return gather_from_sequence_parallel_region(inputs, group=self.group) if self.shares_rows else inputs

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of this rank's input, [rows, b, in]."""
        partial = gradient @ self.weight
        if self.shares_rows:
            return reduce_scatter_to_sequence_parallel_region(partial, group=self.group)
        if self.group is not None:
            dist.all_reduce(partial, group=self.group)
        return partial


class WeightGradients:
    """The postponed weight gradients of a step: for each slice, pairs of an input and an output gradient."""

    def __init__(self) -> None:
        self._waiting: dict[Action, deque[tuple[Product, torch.Tensor, torch.Tensor]]] = {}
        self._running: Action | None = None

    def collect(self, action: Action) -> None:
        """Collect the postponed products of the next backward pass for ``action``."""
        self._running = action
        self._waiting[action] = deque()

    def add(self, product: Product, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Store the input [rows, b, in] and the output gradient [all rows, b, out] of one product."""
        assert self._running is not None, "a backward pass outside of a step"
        self._waiting[self._running].append((product, inputs, gradient))

    @torch.no_grad()
    def run(self, action: Action, is_last: bool) -> None:
        """Compute the weight gradients of ``action``, last layer first, and free their inputs.

        Megatron's DDP starts to reduce a gradient when autograd delivers it, in the last backward pass of a step. So
        autograd delivers only the last gradient of each weight, and earlier gradients are added directly to the
        weight's sum.
        """
        waiting = self._waiting.pop(action)
        while waiting:
            product, inputs, gradient = waiting.popleft()
            rows = product.all_rows(inputs)
            of_weight = gradient.flatten(0, -2).t() @ rows.flatten(0, -2)
            if is_last:
                product.weight.backward(of_weight)
            else:
                product.weight.main_grad.add_(of_weight)  # type: ignore[attr-defined]

    @property
    def is_empty(self) -> bool:
        """Whether no weight gradient is pending."""
        return not self._waiting


class _Ctx(torch.autograd.function.FunctionCtx):
    product: Product
    has_bias: bool
    saved_tensors: tuple[torch.Tensor]


class SplitProduct(torch.autograd.Function):
    """``x W^T + bias``. The backward pass returns the gradients of x and bias; the gradient of W follows later."""

    @staticmethod
    def forward(ctx: _Ctx, inputs: torch.Tensor, bias: torch.Tensor | None, product: Product) -> torch.Tensor:
        """Return the output [all rows, b, out]. ``inputs``: [rows, b, in]; ``bias``: [out]."""
        ctx.product, ctx.has_bias = product, bias is not None
        ctx.save_for_backward(inputs)
        return torch.nn.functional.linear(product.all_rows(inputs), product.weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Return the gradients of the inputs and the bias. ``gradient``: output gradient [all rows, b, out]."""
        (inputs,) = ctx.saved_tensors
        of_bias = gradient.flatten(0, -2).sum(dim=0) if ctx.has_bias else None
        ctx.product.gradients.add(ctx.product, inputs.detach(), gradient)
        return ctx.product.input_gradient(gradient), of_bias, None


class _Split:
    """Mixin for one of Megatron's linear layers that computes products of training passes by ``SplitProduct``."""

    def __init__(self, *args: object, runtime: Runtime, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = runtime

    def _forward_impl(self, input: torch.Tensor, weight: torch.nn.Parameter, **options: Any) -> torch.Tensor:
        if not (weight.requires_grad and torch.is_grad_enabled()):
            output: torch.Tensor = super()._forward_impl(input=input, weight=weight, **options)  # type: ignore[misc]
            return output
        shares_rows = options["sequence_parallel"]
        group = options["tp_group"] if shares_rows or options["allreduce_dgrad"] else None
        gradients = self.runtime.step.weight_gradients
        assert gradients is not None, "no step of a zero-bubble schedule is running"
        product = Product(weight, group, shares_rows, gradients)
        return SplitProduct.apply(input, options["bias"], product)


class SplitColumnParallelLinear(_Split, ColumnParallelLinear):
    """Megatron's ``ColumnParallelLinear`` with a postponed weight gradient."""


class SplitRowParallelLinear(_Split, RowParallelLinear):
    """Megatron's ``RowParallelLinear`` with a postponed weight gradient."""
