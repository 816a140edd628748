"""Weights of sources in a mixture, from their size, duplication and quality and a temperature.

BaichuanSEED (arXiv 2408.15079) deduplicates globally and sets its mixture by experiments; its rule is not public. These
weights are a transparent starting point: each factor is printed with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class MixturePart:
    """A data set of a mixture.

    Attributes:
        prefix: prefix of its files.
        source: source of its documents; shares are assigned to sources.
        tokens: number of tokens.
        samples: number of samples of one epoch.
        weight: weight of its documents relative to the other data sets of the source.
    """

    prefix: str
    source: str
    tokens: int
    samples: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class SourceQuality:
    """Fractions of a source's documents that were dropped as duplicates, and that passed the filters."""

    duplication: float = 0.0
    quality: float = 1.0


@dataclass(frozen=True, slots=True)
class ShareFactors:
    """Influence of each property on the shares.

    Attributes:
        temperature: 1 leaves the shares as they are, a higher temperature makes them more even.
        duplication: exponent of the fraction of documents that are not duplicates; 0 ignores it.
        quality: exponent of the fraction of documents that passed the filters; 0 ignores it.
    """

    temperature: float = 1.0
    duplication: float = 1.0
    quality: float = 1.0


@dataclass(frozen=True, slots=True)
class SourceShare:
    """Share of a source in the mixture, and the factors behind it.

    Attributes:
        source: name of the source.
        tokens: number of tokens, each multiplied by the weight of its document.
        size: fraction of these tokens of all sources.
        duplication: factor for duplication.
        quality: factor for quality.
        share: fraction of the training tokens.
    """

    source: str
    tokens: float
    size: float
    duplication: float
    quality: float
    share: float


def weigh(
    data_sets: Sequence[MixturePart], qualities: Mapping[str, SourceQuality], exponents: ShareFactors
) -> list[SourceShare]:
    """Return the share of each source, in order of first appearance.

    The share of a source is proportional to ``(tokens x (1 - duplication)^a x quality^b)^(1 / temperature)``.

    Args:
        data_sets: data sets of the mixture.
        qualities: quality of each source; a missing source has no duplicates and passed all filters.
        exponents: influence of each property.

    Raises:
        ValueError: all shares are 0, because no source has documents that passed the filters.
    """
    names = list(dict.fromkeys(item.source for item in data_sets))
    tokens = np.array([sum(item.tokens * item.weight for item in data_sets if item.source == name) for name in names])
    known = [qualities.get(name, SourceQuality()) for name in names]
    duplication = np.array([(1 - source.duplication) ** exponents.duplication for source in known])
    quality = np.array([source.quality**exponents.quality for source in known])
    tempered = (tokens * duplication * quality) ** (1 / exponents.temperature)
    if not tempered.sum() > 0:
        raise ValueError("no source has any weight: none has documents that passed the filters")
    shares = tempered / tempered.sum()
    sizes = tokens / tokens.sum()
    columns = zip(names, tokens, sizes, duplication, quality, shares, strict=True)
    return [SourceShare(name, *map(float, values)) for name, *values in columns]


def reweigh(shares: Sequence[SourceShare], factors: Mapping[str, float]) -> list[SourceShare]:
    """Return the shares, multiplied by the factor of each source and normalized to a sum of 1."""
    scaled = np.array([item.share * factors.get(item.source, 1.0) for item in shares])
    scaled /= scaled.sum()
    return [replace(item, share=float(share)) for item, share in zip(shares, scaled, strict=True)]


def blend(data_sets: Sequence[MixturePart], shares: Sequence[SourceShare]) -> list[tuple[float, str]]:
    """Return (weight, prefix) of each data set. The weights sum to 1.

    Megatron blends by samples, not by tokens. So a source with long samples gets fewer samples, and its share of the
    tokens is as given.
    """
    by_source = {item.source: item for item in shares}
    samples = []
    for item in data_sets:
        source = by_source[item.source]
        tokens = source.share * item.tokens * item.weight / source.tokens
        samples.append(tokens * item.samples / item.tokens)
    weights = np.array(samples) / np.array(samples).sum()
    return [(float(weight), item.prefix) for weight, item in zip(weights, data_sets, strict=True)]


def epochs(data_sets: Sequence[MixturePart], shares: Sequence[SourceShare], budget: int) -> dict[str, float]:
    """Return the number of epochs of each data set, by prefix, in a training run of ``budget`` tokens."""
    weights = [weight for weight, _ in blend(data_sets, shares)]
    parts = np.array([weight * item.tokens / item.samples for weight, item in zip(weights, data_sets, strict=True)])
    parts /= parts.sum()
    return {item.prefix: float(part * budget / item.tokens) for part, item in zip(parts, data_sets, strict=True)}
