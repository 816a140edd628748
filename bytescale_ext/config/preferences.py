"""Settings of losses of groups: pairs of answers, and answers with advantages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreferenceConfig:
    """Training on groups: a preferred answer and another, or recorded rollouts.

    Attributes:
        loss: name of the loss (``bytescale_ext/losses/preferences.py``, ``bytescale_ext/losses/policy.py``).
        beta: its coefficient; for GRPO, of the divergence from the reference model.
        references: path of the sidecar of the reference model's log-probabilities by prefix of the data set; empty if
            the loss has no reference model.
        clip: distances below and above 1 up to which the ratio of policies counts (GRPO).
    """

    loss: str
    beta: float
    references: tuple[tuple[str, str], ...] = ()
    clip: tuple[float, float] = (0.2, 0.2)
