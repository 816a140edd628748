"""Settings of the loss in chunks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossChunks:
    """Output layer and loss in chunks: only the logits of ``num_tokens`` tokens exist at a time."""

    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"--chunked-cross-entropy {self.num_tokens} must be at least 1 token")
