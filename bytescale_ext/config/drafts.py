"""Settings of draft heads."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

KINDS: Final = ("clover", "medusa")
LAYERS: Final = {"clover": 2, "medusa": 0}
"""Default number of transformer layers below the heads."""


@dataclass(frozen=True)
class DraftConfig:
    """Draft heads, which predict the tokens after the next token.

    Attributes:
        kind: "clover" if each head receives the token predicted by the head before it, "medusa" if heads are
            independent.
        num_heads: number of heads. Head i predicts the token i + 2 positions after the last input token.
        num_layers: number of transformer layers between the model and its heads.
        decay: ratio of a head's loss weight to the loss weight of the head before it.
        hidden_weight: weight of the distance between a head's input to the output layer and the model's own input to
            the output layer one forward pass later. The distance is added to the cross entropy.
        train_trunk: whether the model is also trained, on its own loss and the losses of the heads.
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
