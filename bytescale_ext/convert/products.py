"""Queries, keys and values in one product, as Megatron has them, and apart."""

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
