"""Weights of a blend as shares of documents and as shares of tokens.

Samples of one length hold equally many tokens, so weights that count samples are shares of tokens. Documents differ in
length. Weights ``w`` of documents give shares ``w m / sum(w m)`` of the tokens, with ``m`` tokens in the mean sample of
a data set; weights ``w / m`` give shares ``w``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlendShares:
    """The shares of a weighted blend.

    Attributes:
        prefixes: data sets.
        weights: weight of each data set, as the user gave it.
        tokens: tokens of the mean sample of each data set.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...]
    tokens: tuple[float, ...]

    @property
    def of_documents(self) -> tuple[float, ...]:
        """Shares of the tokens if the weights count documents."""
        return _normalized([weight * size for weight, size in zip(self.weights, self.tokens, strict=True)])

    @property
    def token_weights(self) -> tuple[float, ...]:
        """Weights of documents that make ``weights`` shares of the tokens; their sum is 1."""
        return _normalized([weight / size for weight, size in zip(self.weights, self.tokens, strict=True)])

    def text(self, by_tokens: bool, option: str) -> str:
        """Return one log line: the meaning of the weights, and how to get the other meaning with ``option``."""
        given, of_documents = _normalized(self.weights), self.of_documents
        names = [prefix.rpartition("/")[2] for prefix in self.prefixes]
        weights = " ".join(
            f"{weight:.4g} {prefix}" for weight, prefix in zip(self.token_weights, self.prefixes, strict=True)
        )
        if by_tokens:
            return f"weights of the data path are shares of tokens; documents are drawn with the weights {weights}"
        shares = ", ".join(
            f"{name} {documents:.1%} of the documents and {tokens:.1%} of the tokens"
            for name, documents, tokens in zip(names, given, of_documents, strict=True)
        )
        return (
            f"weights of the data path are shares of documents: {shares}; {option} makes them shares of tokens, as the "
            f"weights {weights} do"
        )


def _normalized(values: Sequence[float]) -> tuple[float, ...]:
    total = sum(values)
    return tuple(value / total for value in values)
