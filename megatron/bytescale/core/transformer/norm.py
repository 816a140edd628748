"""A norm for Megatron's local layer spec that supports sequence parallelism."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig


class LocalNorm:
    """torch's LayerNorm or RMSNorm, as ``config.normalization`` says, with its parameters marked for Megatron.

    Under sequence parallelism each rank normalizes its own tokens, so the gradients of the norm's weights must be
    summed over the tensor-parallel group. Megatron sums the gradients of parameters with ``sequence_parallel`` set.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> torch.nn.Module:  # type: ignore[misc]
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in kinds:
            raise ValueError(
                f"--normalization {config.normalization} needs TransformerEngine; use {' or '.join(kinds)}"
            )
        if config.layernorm_zero_centered_gamma:
            raise ValueError("--apply-layernorm-1p needs TransformerEngine; remove it")
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
