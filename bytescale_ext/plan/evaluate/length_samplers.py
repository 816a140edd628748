"""Synthetic document lengths from published distributions, for the comparison of planners.

Most distributions are tables: a bucket is drawn by its share of the documents, then a length log-uniformly inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]

_BATCH: Final = 4096  # documents drawn together; with another number the same seed draws other lengths
_MOST_EMPTY_BATCHES: Final = 1000

_OCTAVES: Final = tuple(float(1 << power) for power in range(11, 22))  # 2K, 4K, ... 2M
_BYTED: Final = (58.36, 19.71, 10.64, 5.99, 3.19, 1.064, 0.511, 0.266, 0.133, 0.085, 0.0529)
_GITHUB: Final = (83.12, 10.13, 3.71, 1.82, 0.677, 0.339, 0.143, 0.050, 0.014, 0.004, 0.0013)
_WIKIPEDIA: Final = (
    5, 0, 0, 0, 23, 0, 0, 29, 21, 0, 21, 51, 54, 76, 80, 200, 352, 495, 528, 1253, 2554, 3958, 6948, 10165, 17380,
    26949, 39542, 52851, 50919, 49600, 52784, 46922, 52739, 48034, 47990, 54483, 59848, 46198, 39408, 37426, 38201,
    31791, 28539, 25918, 22134, 18425, 16127, 13695, 11335, 9163, 7830, 6049, 4917, 3914, 3063, 2456, 1788, 1254, 966,
    713, 532, 391, 271, 217, 148, 89, 64, 41, 34, 11, 14, 11, 6, 5, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1,
)  # fmt: skip
"""Documents in each quarter octave: entry k counts lengths in (2^((k-1)/4), 2^(k/4)]."""


def _from_table(lows: Floats, highs: Floats, weights: tuple[float, ...]) -> Draw:
    """Return a function that draws lengths from buckets (low, high] by their weights. Arguments: [buckets] each."""
    shares = np.array(weights) / sum(weights)

    def draw(random: np.random.Generator, count: int) -> Floats:
        buckets = random.choice(len(shares), size=count, p=shares)
        lengths = lows[buckets] * (highs[buckets] / lows[buckets]) ** random.random(count)
        return np.asarray(np.ceil(lengths))

    return draw


def _log_normal(random: np.random.Generator, count: int, mean: float, sigma: float) -> Floats:
    return np.asarray(random.lognormal(np.log(mean) - sigma**2 / 2, sigma, count))


def _draw_log_normal(random: np.random.Generator, count: int) -> Floats:
    return np.maximum(128.0, np.rint(_log_normal(random, count, 1024.0, 1.5)))


def _draw_sft(random: np.random.Generator, count: int) -> Floats:
    is_long = random.random(count) < 0.0011
    short, long = _log_normal(random, count, 512.0, 0.8), _log_normal(random, count, 37_000.0, 0.5)
    return np.maximum(1.0, np.rint(np.where(is_long, long, short)))


def _samplers() -> dict[str, Draw]:
    octaves = np.array(_OCTAVES)
    lows = np.append(256.0, octaves[:-1])
    quarters = 2.0 ** (np.arange(-1, len(_WIKIPEDIA)) / 4)
    return {
        "byted": _from_table(lows, octaves, _BYTED),
        "github": _from_table(lows, octaves, _GITHUB),
        "wikipedia": _from_table(quarters[:-1], quarters[1:], _WIKIPEDIA),
        "sft": _draw_sft,
        "lognormal": _draw_log_normal,
    }


SAMPLERS: Final[Mapping[str, Draw]] = MappingProxyType(_samplers())
"""Name -> draw of lengths, without a limit of context.

byted, github: per cent of documents by bucket, ByteScale Fig. 4 (the order of Byted's buckets below 64K is a
    reconstruction; the first bucket begins at 256 tokens).
wikipedia: a histogram of the million lengths published with FlexSP (Wang et al. 2025; galvatron/datasets/wikipedia.txt,
    Apache-2.0).
sft: 99.89 % short and 0.11 % long documents of 37K tokens in the mean (Llama 3, Dubey et al. 2024);
    both log-normal, the short ones of 512 tokens in the mean.
lognormal: mean 1024, sigma 1.5, at least 128 (the example of Megatron's dynamic context parallelism).
"""


def sample_documents(name: str, context: int, count: int, seed: int) -> tuple[int, ...]:
    """Return the lengths of the first ``count`` documents of ``sample_lengths``. Raises ValueError as it does."""
    num_tokens = max(context, 1024 * count)
    while len(lengths := sample_lengths(name, context, num_tokens, seed)) < count:
        num_tokens *= 2
    return tuple(lengths[:count].tolist())


def sample_lengths(name: str, context: int, num_tokens: int, seed: int) -> Ints:
    """Return the lengths of documents of one step: [n], in the order drawn.

    Documents longer than ``context`` are drawn again. The step is the longest run of draws with at most
    ``num_tokens`` tokens (and at least one document). Equal arguments give equal lengths.

    Args:
        name: a key of ``SAMPLERS``.
        context: largest number of tokens of a document.
        num_tokens: tokens of the step, at least ``context``.
        seed: at least 0.

    Raises:
        ValueError: an unknown name, a size that is not positive, or a context below all lengths that the sampler draws.
    """
    if name not in SAMPLERS:
        raise ValueError(f"sampler {name!r} is unknown; choose one of {', '.join(SAMPLERS)}")
    if context < 1 or num_tokens < context:
        raise ValueError(f"context {context} and {num_tokens} tokens of a step: give 1 <= context <= tokens")
    if seed < 0:
        raise ValueError(f"seed {seed} must be at least 0")
    random = np.random.default_rng(seed)
    kept: list[Floats] = []
    total = 0.0
    num_empty = 0
    while total <= num_tokens:
        lengths = SAMPLERS[name](random, _BATCH)
        kept.append(lengths[lengths <= context])
        total += float(kept[-1].sum())
        num_empty += not len(kept[-1])
        if num_empty > _MOST_EMPTY_BATCHES:
            raise ValueError(f"sampler {name} draws no document of at most {context} tokens; raise the context")
    lengths = np.concatenate(kept).astype(np.int64)
    return np.asarray(lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), num_tokens, side="right")))])
