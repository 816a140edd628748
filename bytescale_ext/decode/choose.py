"""How a model chooses its next token. Drafts do not change it: each node of a tree chooses as plain decoding would.

A guess is accepted where it is the token that the model has chosen there. Since the guesses of a node are fixed before
the model chooses, that is the lossless rule of speculative sampling (arXiv 2211.17192) for guesses without chance: the
tokens have exactly the distribution of plain sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chooser:
    """Choice of tokens.

    Attributes:
        temperature: of the distribution; 0: the likeliest token.
        vocab: tokens are below it; logits beyond are padding.
        generator: draws, on the CPU.
    """

    temperature: float
    vocab: int
    generator: torch.Generator

    def __call__(self, logits: torch.Tensor) -> list[int]:
        """Return a token for each row of logits [n, v]."""
        known = logits[:, : self.vocab].float().cpu()
        if not self.temperature:
            return [int(token) for token in known.argmax(-1)]
        chances = (known / self.temperature).softmax(-1)
        return [int(token) for token in torch.multinomial(chances, 1, generator=self.generator)]
