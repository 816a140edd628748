"""Products that Megatron keeps together and other models apart, or in another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def split_qkv(product: torch.Tensor, num_groups: int, head_dim: int) -> list[torch.Tensor]:
    """Return the queries, keys and values of a weight or bias [n, ...], each [heads * head_dim, ...].

    Megatron keeps the queries of a group of heads, their key and their value together.
    """
    by_group = product.unflatten(0, (num_groups, -1, head_dim))
    return [part.flatten(0, 2) for part in by_group.split([by_group.shape[1] - 2, 1, 1], dim=1)]


def join_qkv(parts: Sequence[torch.Tensor], num_groups: int, head_dim: int) -> torch.Tensor:
    """Return what ``split_qkv`` was given, [n, ...], from queries, keys and values [heads * head_dim, ...]."""
    return torch.cat([part.unflatten(0, (num_groups, -1, head_dim)) for part in parts], dim=1).flatten(0, 2)


def unstack(stacked: torch.Tensor, alternates: bool) -> list[torch.Tensor]:
    """Return each expert's weight [outputs, inputs] or bias [outputs] of stacked ones.

    Args:
        stacked: [experts, inputs, outputs] or [experts, outputs].
        alternates: its outputs are a gate, an up, a gate ...; those returned are all gates, then all ups.
    """
    found = []
    for one in stacked:
        turned = one.T if one.dim() == 2 else one
        found.append(torch.cat((turned[0::2], turned[1::2])) if alternates else turned.contiguous())
    return found


def stack(experts: Sequence[torch.Tensor], alternates: bool) -> torch.Tensor:
    """Return what ``unstack`` was given, [experts, ..., outputs], from weights [outputs, inputs] or biases."""
    ordered = [torch.stack(one.chunk(2), dim=1).flatten(0, 1) if alternates else one for one in experts]
    return torch.stack([one.T if one.dim() == 2 else one for one in ordered])
