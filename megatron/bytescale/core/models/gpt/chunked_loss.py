"""Output layer and loss in chunks of tokens, so that the logits of a long sequence never exist all at once.

Calls Megatron's own output layer and loss for a few tokens at a time, so all their options keep working: tensor and
sequence parallelism, accumulation of the weight's gradient, scaled logits. Fused kernels of liger-kernel and
cut-cross-entropy bypass them (docs/activations.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint


def use_chunked_loss(num_tokens: int, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """``ModelConfig.pre_wrap_hooks``: call each model chunk that has the output layer with an ``output_processor``."""
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

    Holds the logits of ``num_tokens`` tokens at a time and computes them again in the backward pass. Each chunk
    communicates on the tensor-parallel group, as Megatron's output layer and loss do. Under sequence parallelism
    (hidden states [s / tp, b, h]) a chunk takes the same rows of every rank.
    """

    def losses_of(hidden: torch.Tensor, chunk_labels: torch.Tensor) -> torch.Tensor:
        logits, _ = output_layer(hidden, weight=output_weight, runtime_gather_output=runtime_gather_output)
        return compute_language_model_loss(chunk_labels, scale_logits(logits))

    if labels is None:
        logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)
        return scale_logits(logits).transpose(0, 1).contiguous()
    rows, batch = hidden_states.shape[:2]
    ranks = labels.shape[1] // rows  # ranks that share the sequence under sequence parallelism
    by_rank = labels.unflatten(1, (ranks, rows))
    step = max(1, num_tokens // (batch * ranks))
    losses = []
    for start in range(0, rows, step):
        chunk_labels = by_rank[:, :, start : start + step].flatten(1)
        hidden = hidden_states[start : start + step]
        chunk = checkpoint(losses_of, hidden, chunk_labels, use_reentrant=False, preserve_rng_state=False)
        losses.append(chunk.unflatten(1, (ranks, -1)))
    return torch.cat(losses, dim=2).flatten(1)
