"""Gumbel noise that belongs to tokens: a hash of seed, step, layer, token and expert, with no state.

So a token has the same noise on whatever rank and in whatever slice it is computed, when it is recomputed, and in a run
that is resumed. The hash is the finalizer of SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number
generators", section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from bytescale_ext.data.samples.packed import PackedMicroBatch

_GOLDEN: Final = -0x61C8864680B583EB  # 2^64 over the golden ratio, as a signed number
_FACTORS: Final = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))


def gumbel_noise(tokens: torch.Tensor, num_experts: int, salt: Sequence[int]) -> torch.Tensor:
    """Return float32 [tokens, experts] from the standard Gumbel distribution.

    Args:
        tokens: int64 [tokens], a number for each token.
        num_experts: of the layer.
        salt: what else the noise depends on.
    """
    state = tokens
    for number in salt:
        state = _mixed(state + _GOLDEN) ^ number
    experts = torch.arange(1, num_experts + 1, device=tokens.device) * _GOLDEN
    hashed = _mixed(_mixed(state)[:, None] + experts)
    uniform = (_shifted(hashed, 11).double() + 0.5) * 2.0**-53  # above 0 and below 1
    return (-torch.log(-torch.log(uniform))).float()


def _mixed(state: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers [...] whose bits all depend on all bits of ``state``; products wrap."""
    for shift, factor in _FACTORS:
        state = (state ^ _shifted(state, shift)) * factor
    return state ^ _shifted(state, 31)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Return [...] shifted right, filled up with zeros."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def numbers_of_documents(packed: PackedMicroBatch) -> torch.Tensor:
    """Return int64 [rows, 1]: of each row the sequence of the step and the position in it; -1 in padding."""
    shards = packed.micro_batch.shards
    counts = torch.tensor([shard.num_tokens for shard in shards], dtype=torch.int64)
    sequences = torch.tensor([shard.seq for shard in shards], dtype=torch.int64).repeat_interleave(counts)
    numbers = torch.full((packed.num_rows,), -1, dtype=torch.int64)
    numbers[: len(sequences)] = _number(sequences, packed.positions[: len(sequences)].cpu())
    return numbers[:, None]


def numbers_of_samples(first: int, batch: int, positions: range) -> torch.Tensor:
    """Return int64 [rows, b] for samples ``first`` and after it in the step, at these positions."""
    samples = first + torch.arange(batch)
    return _number(samples[None], torch.tensor(positions, dtype=torch.int64)[:, None])


def _number(samples: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return one number, in the shape of both, of a sample of the step and a position."""
    return samples * (1 << 32) + positions
