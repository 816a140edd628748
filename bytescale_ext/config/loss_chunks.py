"""Settings of the chunked loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossChunks:
    """Computation of output layer and loss in chunks, so that only ``num_tokens`` tokens have logits at a time."""

    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"--chunked-cross-entropy {self.num_tokens} must be at least 1 token")
