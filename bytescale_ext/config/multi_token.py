"""Settings of multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MultiTokenConfig:
    """Layers after the model's own, each of which guesses one token further ahead (DeepSeek-V3, section 2.2).

    Attributes:
        num_heads: depths: layer k guesses the token k + 1 places after the next one.
        loss_scale: weight of each depth's loss beside that of the next token.
    """

    num_heads: int
    loss_scale: float
