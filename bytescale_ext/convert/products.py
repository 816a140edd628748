"""Weights that Megatron fuses and other models keep apart, or in another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def split_qkv(fused: torch.Tensor, num_groups: int, head_dim: int) -> list[torch.Tensor]:
    """Split Megatron's fused weight or bias [n, ...] into queries, keys and values, each [heads * head_dim, ...].

    Megatron stores group after group: the query heads of the group, then its key head, then its value head.
    """
    by_group = fused.unflatten(0, (num_groups, -1, head_dim))
    return [part.flatten(0, 2) for part in by_group.split([by_group.shape[1] - 2, 1, 1], dim=1)]


def join_qkv(parts: Sequence[torch.Tensor], num_groups: int, head_dim: int) -> torch.Tensor:
    """Fuse queries, keys and values [heads * head_dim, ...] into [n, ...]; the inverse of ``split_qkv``."""
    return torch.cat([part.unflatten(0, (num_groups, -1, head_dim)) for part in parts], dim=1).flatten(0, 2)


def unstack(stacked: torch.Tensor, alternates: bool) -> list[torch.Tensor]:
    """Split a stacked tensor into the weight [outputs, inputs] or bias [outputs] of each expert.

    Args:
        stacked: weights [experts, inputs, outputs] or biases [experts, outputs].
        alternates: whether the outputs of gate and up alternate in ``stacked``. The result has all outputs of the gate
            first, then all outputs of up.
    """
    experts = []
    for tensor in stacked:
        expert = tensor.T if tensor.dim() == 2 else tensor
        experts.append(torch.cat((expert[0::2], expert[1::2])) if alternates else expert.contiguous())
    return experts


def stack(experts: Sequence[torch.Tensor], alternates: bool) -> torch.Tensor:
    """Stack weights [outputs, inputs] or biases [outputs] to [experts, ..., outputs]; the inverse of ``unstack``."""
    ordered = [torch.stack(expert.chunk(2), dim=1).flatten(0, 1) if alternates else expert for expert in experts]
    return torch.stack([expert.T if expert.dim() == 2 else expert for expert in ordered])
