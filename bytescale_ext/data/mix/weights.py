"""Weights of sources in a mixture, from size, duplication, quality and a temperature; pure.

BaichuanSEED (arXiv 2408.15079) deduplicates globally and sets its mixture by experiments; its rule is not public. These
weights are a start that can be read: each factor is printed beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Part:
    """A data set of a mixture.

    Attributes:
        prefix: of its files.
        source: that its documents are of; weights are given to sources.
        tokens: that it has.
        samples: that one epoch of it has.
        weight: how often each document of it counts, against the other data sets of its source.
    """

    prefix: str
    source: str
    tokens: int
    samples: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a source: shares of its documents that went as duplicates, and that passed the filters."""

    duplication: float = 0.0
    quality: float = 1.0


@dataclass(frozen=True, slots=True)
class Temper:
    """How strongly each property counts; 0 is not at all.

    Attributes:
        temperature: 1 leaves shares as they are, more makes them even.
        duplication: exponent of the share that was no duplicate.
        quality: exponent of the share that passed the filters.
    """

    temperature: float = 1.0
    duplication: float = 1.0
    quality: float = 1.0


@dataclass(frozen=True, slots=True)
class Weighed:
    """The weight of a source and its reason.

    Attributes:
        source: its name.
        tokens: that it has, those of weighed documents counted as often as they weigh.
        size: its share of all of these tokens.
        duplication, quality: the factors of these.
        share: of the tokens that a training sees.
    """

    source: str
    tokens: float
    size: float
    duplication: float
    quality: float
    share: float


def weigh(parts: Sequence[Part], known: dict[str, Known], temper: Temper) -> list[Weighed]:
    """Return the weight of each source, in the order in which sources appear.

    The share of a source is ``(tokens x (1 - duplication)^a x quality^b)^(1 / T)`` over the sum of these.

    Raises:
        ValueError: no share is left, because no source has documents that passed.
    """
    sources = list(dict.fromkeys(part.source for part in parts))
    tokens = np.array([sum(part.tokens * part.weight for part in parts if part.source == one) for one in sources])
    about = [known.get(one, Known()) for one in sources]
    duplication = np.array([(1 - one.duplication) ** temper.duplication for one in about])
    quality = np.array([one.quality**temper.quality for one in about])
    tempered = (tokens * duplication * quality) ** (1 / temper.temperature)
    if not tempered.sum() > 0:
        raise ValueError("no source has any weight: none has documents that passed the filters")
    shares = tempered / tempered.sum()
    sizes = tokens / tokens.sum()
    columns = zip(sources, tokens, sizes, duplication, quality, shares, strict=True)
    return [Weighed(name, *map(float, values)) for name, *values in columns]


def reweigh(weighed: Sequence[Weighed], factors: dict[str, float]) -> list[Weighed]:
    """Return the weights with the shares times these factors, and a sum of 1."""
    shares = np.array([one.share * factors.get(one.source, 1.0) for one in weighed])
    shares /= shares.sum()
    return [
        Weighed(one.source, one.tokens, one.size, one.duplication, one.quality, float(share))
        for one, share in zip(weighed, shares, strict=True)
    ]


def blend(parts: Sequence[Part], weighed: Sequence[Weighed]) -> list[tuple[float, str]]:
    """Return (weight, prefix) of each data set, as Megatron blends them: by samples, not by tokens. The sum is 1.

    A source whose samples are long gets fewer of them, so that its share of the tokens is the one it was given.
    """
    share = {one.source: one.share for one in weighed}
    of_source = {one.source: one.tokens for one in weighed}
    wanted = [share[part.source] * part.tokens * part.weight / of_source[part.source] for part in parts]
    samples = np.array([tokens * part.samples / part.tokens for tokens, part in zip(wanted, parts, strict=True)])
    return [(float(one), part.prefix) for one, part in zip(samples / samples.sum(), parts, strict=True)]


def epochs(parts: Sequence[Part], weighed: Sequence[Weighed], budget: int) -> dict[str, float]:
    """Return how often a training of ``budget`` tokens sees each data set, by prefix."""
    shares = np.array([weight * part.tokens / part.samples for (weight, _), part in _paired(parts, weighed)])
    shares /= shares.sum()
    return {part.prefix: float(share * budget / part.tokens) for share, part in zip(shares, parts, strict=True)}


def _paired(parts: Sequence[Part], weighed: Sequence[Weighed]) -> list[tuple[tuple[float, str], Part]]:
    return list(zip(blend(parts, weighed), parts, strict=True))
