"""Settings of multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MultiTokenConfig:
    """Layers after the model that predict tokens further ahead (DeepSeek-V3, section 2.2).

    Attributes:
        num_heads: number of layers (depths). Layer k predicts the token k + 1 positions after the next token.
        loss_scale: weight of the loss of each depth; the loss of the next token has the weight 1.
    """

    num_heads: int
    loss_scale: float

    def __post_init__(self) -> None:
        if self.num_heads < 1:
            raise ValueError(f"--mtp-num-layers {self.num_heads} must be at least 1")
        if not 0 <= self.loss_scale < float("inf"):
            raise ValueError(f"--mtp-loss-scaling-factor {self.loss_scale * self.num_heads:g} must be 0 or more")
