"""Settings of draft heads."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

KINDS: Final = ("clover", "medusa")
LAYERS: Final = {"clover": 2, "medusa": 0}
"""Transformer layers below the heads, by default."""


@dataclass(frozen=True)
class DraftConfig:
    """Heads that guess the tokens after the next one.

    Attributes:
        kind: "clover": each head sees the token that the head before it stands for; "medusa": heads are independent.
        num_heads: head i guesses the token i + 2 places after the one that the model has read last.
        num_layers: transformer layers between the model and its heads.
        decay: weight of a head's loss, over that of the head before it.
        hidden_weight: of the difference between what a head gives the output layer and what the model gives it one
            forward pass later, beside the cross entropy.
        train_trunk: the model is trained too, on its own loss and that of the heads.
    """

    kind: str
    num_heads: int
    num_layers: int
    decay: float
    hidden_weight: float = 0.0
    train_trunk: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"--draft-heads {self.kind}: choose one of {', '.join(KINDS)}")
        if self.num_heads < 1:
            raise ValueError(f"--num-draft-heads {self.num_heads} must be at least 1")
        if self.num_layers < 0:
            raise ValueError(f"--draft-layers {self.num_layers} must be at least 0")
        if not 0 < self.decay <= 1:
            raise ValueError(f"--draft-decay {self.decay:g} must be above 0 and at most 1")
        if not 0 <= self.hidden_weight < inf:
            raise ValueError(f"--draft-hidden-weight {self.hidden_weight:g} must be 0 or more")
