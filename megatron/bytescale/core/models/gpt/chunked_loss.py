"""Output layer and loss by chunks of tokens, so that the logits of a long sequence never exist together.

Both are Megatron's own, called for some tokens at a time, so that every setting of them holds: tensor and sequence
parallelism, accumulation of the weight's gradient, scaled logits. Fused kernels of liger-kernel and cut-cross-entropy
take the weight past them (docs/activations.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def use_chunked_loss(num_tokens: int, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """``ModelConfig.pre_wrap_hooks``: let each model chunk that has the output layer compute its loss by chunks."""
    for chunk in model_chunks:
        if getattr(chunk, "post_process", False):
            process = partial(chunked_loss, num_tokens)
            chunk.forward = partial(chunk.forward, output_processor=process)  # type: ignore[method-assign]
    return model_chunks


def chunked_loss(
    num_tokens: int,
    *,
    hidden_states: torch.Tensor,
    output_layer: Callable[..., Any],
    output_weight: torch.Tensor | None,
    labels: torch.Tensor | None,
    runtime_gather_output: bool | None,
    compute_language_model_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    scale_logits: Callable[[torch.Tensor], torch.Tensor],
    **_: Any,
) -> torch.Tensor:
    """GPTModel's ``output_processor``: losses [b, s] of hidden states [s, b, h], exactly those of Megatron.

    Logits of ``num_tokens`` tokens exist at a time; they are computed again in the backward pass. Communicates as
    Megatron's output layer and loss do, on the tensor-parallel group, once for each chunk; under sequence parallelism
    (hidden states [s / tp, b, h]) a chunk takes the same rows of every rank.
    """

    def losses_of(hidden: torch.Tensor, chunk_labels: torch.Tensor) -> torch.Tensor:
        logits, _ = output_layer(hidden, weight=output_weight, runtime_gather_output=runtime_gather_output)
        return compute_language_model_loss(chunk_labels, scale_logits(logits))

    if labels is None:
        logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)
        return scale_logits(logits).transpose(0, 1).contiguous()
    rows, batch = hidden_states.shape[:2]
    ranks = labels.shape[1] // rows  # that share the sequence under sequence parallelism
    by_rank = labels.unflatten(1, (ranks, rows))
    step = max(1, num_tokens // (batch * ranks))
    losses = []
    for start in range(0, rows, step):
        chunk_labels = by_rank[:, :, start : start + step].flatten(1)
        hidden = hidden_states[start : start + step]
        chunk = checkpoint(losses_of, hidden, chunk_labels, use_reentrant=False, preserve_rng_state=False)
        losses.append(chunk.unflatten(1, (ranks, -1)))
    return torch.cat(losses, dim=2).flatten(1)
