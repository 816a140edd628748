"""Sampling of a model's next tokens, with or without drafts.

Each node of a draft tree samples its next token as plain decoding does. A guess is accepted if it equals the token that
its parent has sampled. This is the lossless rule of speculative sampling (arXiv 2211.17192) for deterministic guesses:
the guesses are fixed before the model samples, so the tokens have exactly the distribution of plain sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampler:
    """Sampler of tokens from logits.

    Attributes:
        temperature: temperature of the softmax; 0 takes the most likely token.
        vocab: size of the vocabulary; logits beyond it are padding.
        generator: source of random numbers on the device of the logits.
    """

    temperature: float
    vocab: int
    generator: torch.Generator

    def __call__(self, logits: torch.Tensor) -> list[int]:
        """Return one token per row of logits [n, v]. Only the tokens are copied to the host."""
        scores = logits[:, : self.vocab].float()
        if not self.temperature:
            return list(map(int, scores.argmax(-1).tolist()))
        probabilities = (scores / self.temperature).softmax(-1)
        tokens = torch.multinomial(probabilities, 1, generator=self.generator)
        return list(map(int, tokens[:, 0].tolist()))
