"""Output layer and loss in chunks of tokens, so that the logits of a long sequence are never all in memory.

Megatron's own output layer and loss run on a few tokens at a time, so all their options keep working: tensor and
sequence parallelism, accumulation of the weight gradient, scaled logits. Fused kernels of liger-kernel and
cut-cross-entropy bypass these options (docs/guide/activations.md).

Megatron's matrix product sees a frozen weight, and this file computes the weight gradient: it accumulates the products
of all chunks in float32 and in place, in Megatron's gradient buffer if there is one. So chunks add no rounding to the
gradient compared with one product over all tokens, and no chunk needs a tensor of the weight's size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.function import once_differentiable


def use_chunked_loss(num_tokens: int, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Hook in ``ModelConfig.pre_wrap_hooks``: give each chunk with the output layer an ``output_processor``."""
    process = partial(chunked_loss, num_tokens)

    def add_processor(
        chunk: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return args, {**kwargs, "output_processor": process}

    for chunk in model_chunks:
        if getattr(chunk, "post_process", False):
            chunk.register_forward_pre_hook(add_processor, with_kwargs=True)
    return model_chunks


def chunked_loss(
    num_tokens: int,
    *,
    hidden_states: torch.Tensor,
    output_layer: Callable[..., tuple[torch.Tensor, object]],
    output_weight: torch.Tensor | None,
    labels: torch.Tensor | None,
    runtime_gather_output: bool | None,
    compute_language_model_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    scale_logits: Callable[[torch.Tensor], torch.Tensor],
    **unused: object,
) -> torch.Tensor:
    """GPTModel's ``output_processor``: return Megatron's losses [b, s] of hidden states [s, b, h].

    Holds the logits of ``num_tokens`` tokens at a time and recomputes them in the backward pass. Each chunk
    communicates on the tensor-parallel group, as Megatron's output layer and loss do. Under sequence parallelism
    (hidden states [s / tp, b, h]) a chunk contains the same rows of every rank.
    """
    if labels is None:
        logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)
        return scale_logits(logits).transpose(0, 1).contiguous()
    weight = output_weight if output_weight is not None else output_layer.weight  # type: ignore[attr-defined]
    rows, batch = hidden_states.shape[:2]
    ranks = labels.shape[1] // rows  # ranks that share the sequence under sequence parallelism
    step = max(1, num_tokens // (batch * ranks))
    head = OutputHead(output_layer, runtime_gather_output, compute_language_model_loss, scale_logits)
    losses: torch.Tensor = _ChunkedLoss.apply(hidden_states, weight, labels.unflatten(1, (ranks, rows)), step, head)
    return losses


@dataclass(frozen=True)
class OutputHead:
    """Megatron's output layer and loss.

    Attributes:
        output_layer: the column-parallel product.
        gather_output: argument that is passed to the output layer.
        loss_of: returns the losses [b, n] for labels [b, n] and logits [n, b, v].
        scale_logits: applies Megatron's scale to logits of any shape.
    """

    output_layer: Callable[..., tuple[torch.Tensor, object]]
    gather_output: bool | None
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    scale_logits: Callable[[torch.Tensor], torch.Tensor]

    def run(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logits [n, b, v], losses [b, n]) for hidden [n / ranks, b, h] and labels [b, ranks, n / ranks].

        The weight [v, h] receives no gradient.
        """
        logits, _ = self.output_layer(hidden, weight=weight.detach(), runtime_gather_output=self.gather_output)
        return logits, self.loss_of(labels.flatten(1), self.scale_logits(logits))

    def rows_of_all_ranks(self, hidden: torch.Tensor, ranks: int) -> torch.Tensor:
        """Gather the hidden states [n, b, h] of all ranks that share the sequence from this rank's [n / ranks, b, h].

        Collective on the tensor-parallel group if several ranks share the sequence.
        """
        if ranks == 1:
            return hidden
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        group = getattr(self.output_layer, "tp_group", None)
        whole: torch.Tensor = gather_from_sequence_parallel_region(hidden, group=group)
        return whole


class _LossCtx(torch.autograd.function.FunctionCtx):
    step: int
    head: OutputHead
    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _ChunkedLoss(torch.autograd.Function):
    """Losses [b, s] for hidden states [s / ranks, b, h], a weight [v, h] and labels [b, ranks, s / ranks]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _LossCtx, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, step: int, head: OutputHead
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.step, ctx.head = step, head
        losses = [
            head.run(part, weight, some_labels)[1].unflatten(1, (labels.shape[1], -1))
            for part, some_labels in zip(hidden.detach().split(step), labels.split(step, dim=2), strict=True)
        ]
        return torch.cat(losses, dim=2).flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: _LossCtx, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, labels = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        total = WeightGradient.of(weight) if wants_weight else None
        grad_hidden = torch.empty_like(hidden)
        parts = (hidden.split(ctx.step), labels.split(ctx.step, 2), grad_hidden.split(ctx.step))
        grads = grad_losses.unflatten(1, labels.shape[1:]).split(ctx.step, 2)
        for part, some_labels, grad_part, grad in zip(*parts, grads, strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                logits, losses = ctx.head.run(leaf, weight, some_labels)
                logits.retain_grad()
            torch.autograd.backward(losses, grad.flatten(1))  # grad() would fail for some module hooks
            by_hidden, by_logits = leaf.grad, logits.grad
            assert by_hidden is not None and by_logits is not None, f"{leaf.shape=} {logits.shape=}"
            del logits, losses
            grad_part.copy_(by_hidden)
            if total is not None:
                total.add(by_logits, ctx.head.rows_of_all_ranks(part, labels.shape[1]))
        return grad_hidden if wants_hidden else None, None if total is None else total.finish(), None, None, None


@dataclass(frozen=True)
class WeightGradient:
    """Accumulates a weight gradient from the products of chunks, in at least 32 bits.

    Attributes:
        weight: parameter [v, h].
        total: accumulated gradient [v, h]: Megatron's gradient buffer of the parameter, or a new tensor.
    """

    weight: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> WeightGradient:
        """Return an accumulator for weight [v, h]; it adds to ``main_grad`` if Megatron's DDP lets layers do so."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        main = getattr(weight, "main_grad", None)
        if (
            main is not None
            and hasattr(weight, "grad_added_to_main_grad")
            and (main.dtype, main.device) == (dtype, weight.device)
        ):
            return cls(weight, main)
        return cls(weight, torch.zeros(weight.shape, dtype=dtype, device=weight.device))

    def add(self, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the product of logits' gradients [n, b, v] and hidden states [n, b, h] without rounding it first."""
        left, right = grad_logits.flatten(0, -2).t(), hidden.flatten(0, -2)
        if left.is_cuda and left.dtype != self.total.dtype:
            torch.addmm(self.total, left, right, out_dtype=self.total.dtype, out=self.total)
        else:
            self.total.addmm_(left.to(self.total.dtype), right.to(self.total.dtype))

    def finish(self) -> torch.Tensor:
        """Return the gradient [v, h] that autograd adds to the parameter's gradient.

        If Megatron's buffer has the sum already, DDP's hook needs a tensor but ignores its values. The values are zeros
        for an embedding that is also the output weight, because DDP adds them in that case.
        """
        if self.total is not getattr(self.weight, "main_grad", None):
            return self.total.to(self.weight.dtype)
        self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if getattr(self.weight, "zero_out_wgrad", False):
            return torch.zeros_like(self.weight)
        return torch.empty_like(self.weight)
