"""Sampling of a model's next tokens, with or without drafts.

Each node of a draft tree samples its next token as plain decoding does. A guess is accepted if it equals the token that
its parent has sampled. This is the lossless rule of speculative sampling (arXiv 2211.17192) for deterministic guesses:
the guesses are fixed before the model samples, so the tokens have exactly the distribution of plain sampling.

The random number of a token depends on the seed, the text and the position alone. So a text is the same with and
without drafts, and alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from bytescale_ext.parallel.upload import upload


class Place(NamedTuple):
    """Place of a token: the number of its text, and its position there, both from 0."""

    text: int
    position: int


@dataclass(frozen=True)
class Sampler:
    """Sampler of tokens from logits.

    Attributes:
        temperature: temperature of the softmax; 0 takes the most likely token.
        vocab: size of the vocabulary; logits beyond it are padding.
        seed: seed of the random numbers.
    """

    temperature: float
    vocab: int
    seed: int = 0

    def __call__(self, logits: torch.Tensor, places: Sequence[Place]) -> list[int]:
        """Return the token of each place, from its row of logits [n, v]. Only the tokens are copied to the host."""
        scores = logits[:, : self.vocab].float()
        if not self.temperature:
            return list(map(int, scores.argmax(-1).tolist()))
        cumulative = (scores / self.temperature).softmax(-1, dtype=torch.float64).cumsum(-1)
        numbers = torch.tensor([[self._number(place)] for place in places], dtype=torch.float64)
        # The sum of all probabilities is 1, except for rounding. A token of probability 0 is never taken.
        tokens = torch.searchsorted(cumulative, upload(numbers, logits.device) * cumulative[:, -1:], right=True)
        return list(map(int, tokens[:, 0].clamp(max=scores.shape[1] - 1).tolist()))

    def _number(self, place: Place) -> float:
        """Return the random number of a place, in [0, 1)."""
        key = np.array([self.seed % 2**64, place.text], dtype=np.uint64)
        source = np.random.Philox(counter=[place.position, 0, 0, 0], key=key)
        return float(np.random.Generator(source).random())
