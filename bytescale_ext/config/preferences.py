"""Settings of losses of pairs of answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreferenceConfig:
    """Training on pairs of answers, a preferred answer and another.

    Attributes:
        loss: name of the loss (``bytescale_ext/losses/preferences.py``).
        beta: its coefficient.
        references: path of the sidecar of the reference model's log-probabilities by prefix of the data set; empty if
            the loss has no reference model.
    """

    loss: str
    beta: float
    references: tuple[tuple[str, str], ...] = ()
