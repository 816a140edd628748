"""Noise per token: a hash of seed, step, layer, token and column, without state.

So a token has the same noise on any rank, in any slice, when it is recomputed, and after a run is resumed. The hash is
the finalizer of SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators", section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from bytescale_ext.data.samples.packed import PackedMicroBatch

_GOLDEN: Final = -0x61C8864680B583EB  # 2^64 over the golden ratio, as a signed number
_BITS: Final = 53  # of a double's mantissa
_FACTORS: Final = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))


def gumbel_noise(tokens: torch.Tensor, num_experts: int, salt: Sequence[int]) -> torch.Tensor:
    """Return noise from the standard Gumbel distribution, float32 [tokens, experts].

    Args:
        tokens: number of each token, int64 [tokens].
        num_experts: number of experts of the layer.
        salt: further numbers that the noise depends on.
    """
    return (-torch.log(-torch.log(uniform_noise(tokens, num_experts, salt)))).float()


def uniform_noise(tokens: torch.Tensor, num_columns: int, salt: Sequence[int]) -> torch.Tensor:
    """Return noise that is uniform in the open interval (0, 1), float64 [tokens, columns]. Arguments as above."""
    return (_hashed(tokens, num_columns, salt).double() + 0.5) * 2.0**-_BITS


def keep_mask(tokens: torch.Tensor, num_columns: int, drop: float, salt: Sequence[int]) -> torch.Tensor:
    """Return the mask of kept hidden states, bool [tokens, columns]; ``drop`` is the probability of a False."""
    return _hashed(tokens, num_columns, salt) >= int(drop * 2**_BITS)


def _hashed(tokens: torch.Tensor, num_columns: int, salt: Sequence[int]) -> torch.Tensor:
    """Return a number below ``2**_BITS`` for each token and column, int64 [tokens, columns]."""
    state = tokens
    for number in salt:
        state = _mixed(state + _GOLDEN) ^ number
    columns = torch.arange(1, num_columns + 1, device=tokens.device) * _GOLDEN
    return _shifted(_mixed(_mixed(state)[:, None] + columns), 64 - _BITS)


def _mixed(state: torch.Tensor) -> torch.Tensor:
    """Mix int64 numbers [...] so that every bit depends on all bits of ``state``; products wrap around."""
    for shift, factor in _FACTORS:
        state = (state ^ _shifted(state, shift)) * factor
    return state ^ _shifted(state, 31)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Return [...] shifted right, with zeros shifted in."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def numbers_of_documents(packed: PackedMicroBatch) -> torch.Tensor:
    """Return a number per row, int64 [rows, 1], from the row's sequence in the step and its position; -1 in padding."""
    shards = packed.micro_batch.shards
    counts = torch.tensor([shard.num_tokens for shard in shards], dtype=torch.int64)
    sequences = torch.tensor([shard.seq for shard in shards], dtype=torch.int64).repeat_interleave(counts)
    numbers = torch.full((packed.num_rows,), -1, dtype=torch.int64)
    numbers[: len(sequences)] = _number(sequences, packed.positions[: len(sequences)].cpu())
    return numbers[:, None]


def numbers_of_samples(first: int, batch: int, positions: range) -> torch.Tensor:
    """Return token numbers int64 [rows, b] of samples ``first`` to ``first + b - 1`` of the step at ``positions``."""
    samples = first + torch.arange(batch)
    return _number(samples[None], torch.tensor(positions, dtype=torch.int64)[:, None])


def _number(samples: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Combine samples of the step and positions into one number each, in their shape."""
    return samples * (1 << 32) + positions
