from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.evaluate.length_samplers import SAMPLERS, sample_documents, sample_lengths

MANY = 64 << 20


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_step_is_full_and_fits(name: str) -> None:
    lengths = sample_lengths(name, 1 << 16, 4 << 20, seed=3)
    assert lengths.dtype == np.int64
    assert 1 <= lengths.min()
    assert lengths.max() <= 1 << 16
    assert (4 << 20) - (1 << 16) < lengths.sum() <= 4 << 20


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_seed_is_a_step(name: str) -> None:
    one, again, other = (sample_lengths(name, 1 << 16, 1 << 20, seed) for seed in (0, 0, 1))
    assert np.array_equal(one, again)
    assert not np.array_equal(one[:50], other[:50])


@pytest.mark.parametrize(
    ("name", "mean", "shares"),
    [  # share of documents up to each length
        ("byted", 6650, {2048: 0.5836, 4096: 0.7807, 65536: 0.9895, 1 << 20: 0.99947}),
        ("github", 2100, {2048: 0.8312, 4096: 0.9325, 32768: 0.9946}),
        ("wikipedia", 1015, {347: 0.50, 862: 0.75, 3720: 0.95, 10900: 0.99}),
        ("sft", 552, {1024: 0.897, 8192: 0.9989}),
        ("lognormal", 1030, {128: 0.262, 332: 0.50, 8192: 0.986}),
    ],
)
def test_shares_of_documents(name: str, mean: float, shares: dict[int, float]) -> None:
    lengths = sample_lengths(name, 2 << 20, MANY, seed=5)
    assert lengths.mean() == pytest.approx(mean, rel=0.12)
    for tokens, share in shares.items():
        assert (lengths <= tokens).mean() == pytest.approx(share, abs=0.015)


def test_tokens_of_long_documents() -> None:
    """ByteScale Fig. 4: 44.3 % of Byted's tokens, and 16.2 % of GitHub's, are in buckets from 128K on."""
    for name, share in (("byted", 0.443), ("github", 0.162)):
        lengths = np.concatenate([sample_lengths(name, 2 << 20, MANY, seed) for seed in range(4)])
        assert lengths[lengths > 64 << 10].sum() / lengths.sum() == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(
    ("name", "context", "num_tokens", "seed", "words"),
    [
        ("bytd", 8, 8, 0, "'bytd' is unknown; choose one of byted, github, wikipedia, sft, lognormal"),
        ("byted", 0, 8, 0, "context 0 and 8 tokens"),
        ("byted", 4096, 2048, 0, "context 4096 and 2048 tokens"),
        ("byted", 4096, 8192, -1, "seed -1"),
        ("github", 200, 8192, 0, "github draws no document of at most 200 tokens; raise the context"),
    ],
)
def test_bad_input_is_named(name: str, context: int, num_tokens: int, seed: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sample_lengths(name, context, num_tokens, seed)


@pytest.mark.parametrize("count", [1, 700])
def test_so_many_documents_are_the_first_that_are_drawn(count: int) -> None:
    found = sample_documents("byted", 65536, count, 3)
    assert len(found) == count
    assert list(found) == sample_lengths("byted", 65536, 1 << 24, 3)[:count].tolist()
