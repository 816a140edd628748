"""Settings of supervised fine-tuning on answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AnswerLossConfig:
    """Only answers have a loss; a sample is a conversation.

    Attributes:
        prefixes: the data sets, each with its mask beside it.
    """

    prefixes: tuple[str, ...]
