"""Settings of supervised fine-tuning on answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AnswerLossConfig:
    """Training on conversations. Each conversation is one sample, and only its answers have a loss.

    Attributes:
        prefixes: prefixes of the data sets; the mask of a data set has the same prefix.
    """

    prefixes: tuple[str, ...]
