"""Attention of one document in float32, in tiles of rows, and its gradients: the arithmetic of all played kernels."""

from __future__ import annotations

import torch

TILE = 512
"""Rows whose scores are computed together."""


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [q, heads, width of values] and the log-sum-exp [heads, q] of one document in float32.

    ``query`` [q, heads, d], ``key`` and ``value`` [k, heads or fewer, d], ``hidden`` [q, k].
    """
    repeats = query.shape[1] // key.shape[1]
    keys, values = (one.float().repeat_interleave(repeats, 1) for one in (key, value))
    outputs, sums = [], []
    for tile in tiles(len(query)):
        scores = torch.einsum("qhd,khd->hqk", query[tile].float(), keys) * scale
        scores.masked_fill_(hidden[tile], float("-inf"))
        logs = torch.logsumexp(scores, -1) if len(keys) else torch.full(scores.shape[:2], float("-inf"))
        is_empty = torch.isneginf(logs)
        weights = torch.exp(scores - logs.masked_fill(is_empty, 0)[..., None])
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        sums.append(logs.masked_fill(is_empty, float("inf")))
    return torch.cat(outputs), torch.cat(sums, 1)


def gradients(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    keys: tuple[torch.Tensor, torch.Tensor],
    hidden: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value of one document in float32.

    Args:
        rows: gradient of the output, query and output [q, heads, d], log-sum-exp [heads, q].
        keys: keys and values [k, heads or fewer, d].
        hidden: hidden keys [q, k].
        scale: factor of scores.
    """
    of_out, query, out = (one.float() for one in rows[:3])
    repeats = query.shape[1] // keys[0].shape[1]
    key, value = (one.float().repeat_interleave(repeats, 1) for one in keys)
    of_query, of_key, of_value = (torch.zeros_like(one) for one in (query, key, value))
    for tile in tiles(len(query)):
        sums = rows[3][:, tile, None]
        scores = torch.einsum("qhd,khd->hqk", query[tile], key) * scale
        weights = torch.exp(scores - sums).masked_fill(hidden[tile] | torch.isinf(sums), 0)
        inner = (of_out[tile] * out[tile]).sum(-1).t()[..., None]
        of_scores = weights * (torch.einsum("qhd,khd->hqk", of_out[tile], value) - inner) * scale
        of_query[tile] = torch.einsum("hqk,khd->qhd", of_scores, key)
        of_key += torch.einsum("hqk,qhd->khd", of_scores, query[tile])
        of_value += torch.einsum("hqk,qhd->khd", weights, of_out[tile])
    of_key, of_value = (one.unflatten(1, (-1, repeats)).sum(2) for one in (of_key, of_value))
    return of_query, of_key, of_value


def tiles(num_rows: int) -> list[slice]:
    """Return parts of rows, whose scores fit into memory. There is one part even without rows."""
    return [slice(start, start + TILE) for start in range(0, max(num_rows, 1), TILE)]


def hidden_keys(num_rows: int, num_keys: int, offset: int, left: int | None, right: int | None) -> torch.Tensor:
    """Return the mask of the keys that a row does not see [rows, keys]. Row r is aligned with the key ``r + offset``.

    ``left``, ``right``: numbers of keys that a row sees before and after its own; None or below 0: all.
    """
    row, key = torch.arange(num_rows)[:, None] + offset, torch.arange(num_keys)[None]
    hidden = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    if right is not None and right >= 0:
        hidden |= key > row + right
    if left is not None and left >= 0:
        hidden |= key < row - left
    return hidden
