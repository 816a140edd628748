"""Settings of the largest attention logits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LogitConfig:
    """Measurement of the largest attention logit of each head in each step.

    Attributes:
        clips: whether weights of queries and keys shrink after a step with too large logits (QK-clip, Kimi K2, section
            2.1).
    """

    clips: bool
