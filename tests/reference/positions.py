"""Rotary positions (RoFormer, section 3.2.2) with every scaling, in plain PyTorch."""

from __future__ import annotations

import math

import torch

from tests.reference.settings import Positions, Yarn

LLAMA_LENGTH = 8192  # Llama 3: longest context before scaling, and the numbers of waves in it between which
LLAMA_FEW, LLAMA_MANY = 1.0, 4.0  # frequencies are interpolated


def frequencies(positions: Positions, size: int) -> torch.Tensor:
    """Return the angles per token of ``size`` components, [size / 2]."""
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    plain = positions.base**-exponents
    if positions.yarn is not None:
        kept = _kept_by_yarn(positions.yarn, positions.base, size)
        return plain * kept + plain / positions.yarn.factor * (1 - kept)
    if positions.llama_factor is not None:
        waves = LLAMA_LENGTH * plain / (2 * math.pi)
        kept = ((waves - LLAMA_FEW) / (LLAMA_MANY - LLAMA_FEW)).clamp(0, 1)
        return plain * kept + plain / positions.llama_factor * (1 - kept)
    return plain / positions.interpolation


def _kept_by_yarn(yarn: Yarn, base: float, size: int) -> torch.Tensor:
    """Return 1 for each frequency that YaRN keeps, 0 for each that it divides, and a ramp between, [size / 2]."""
    bounds = [
        size * math.log(yarn.original_length / (2 * math.pi * rotations)) / (2 * math.log(base))
        for rotations in (yarn.fast, yarn.slow)
    ]
    low, high = (math.floor(bounds[0]), math.ceil(bounds[1])) if yarn.is_rounded else bounds
    low, high = max(low, 0), min(high, size - 1)
    return 1 - ((torch.arange(size // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)


def temperature(factor: float, scale: float = 1.0) -> float:
    """Return the square root of YaRN's temperature of scores, for a factor above 1 (YaRN, equation 22)."""
    return 0.1 * scale * math.log(factor) + 1


def rotate(x: torch.Tensor, positions: Positions) -> torch.Tensor:
    """Return ``x`` [tokens, heads, size], rotated by the positions 0, 1, ... of its tokens."""
    size = int(x.shape[-1] * positions.share)
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), frequencies(positions, size))[:, None]
    rotated, rest = x[..., :size], x[..., size:]
    pairs = rotated.unflatten(-1, (-1, 2) if positions.interleaved else (2, -1))
    first, second = pairs.unbind(-1 if positions.interleaved else -2)
    turned = (first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos())
    result = torch.stack(turned, -1 if positions.interleaved else -2).flatten(-2)
    return torch.cat((result * _length(positions.yarn), rest), -1)


def _length(yarn: Yarn | None) -> float:
    """Return the factor of rotated components under YaRN."""
    if yarn is None:
        return 1.0
    if yarn.scale is None or yarn.scale_all is None:
        return temperature(yarn.factor)
    return temperature(yarn.factor, yarn.scale) / temperature(yarn.factor, yarn.scale_all)
