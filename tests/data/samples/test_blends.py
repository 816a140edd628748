"""Weights of a blend as shares of documents and of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.data.samples.blends import BlendShares


def test_equal_shares_of_documents_are_not_equal_shares_of_tokens() -> None:
    """A blend of documents of 20 and of 200 tokens."""
    shares = BlendShares(("data/short", "data/long"), (0.5, 0.5), (20.0, 200.0))
    assert shares.of_documents == pytest.approx((1 / 11, 10 / 11))
    assert shares.token_weights == pytest.approx((10 / 11, 1 / 11))
    assert "short 50.0% of the documents and 9.1% of the tokens" in shares.text(False, "--hdp-blend-by tokens")
    assert "0.9091 data/short 0.09091 data/long" in shares.text(False, "--hdp-blend-by tokens")
    assert "shares of tokens; documents are drawn with the weights 0.9091" in shares.text(True, "")


def test_weights_of_tokens_give_the_shares_that_were_asked_for() -> None:
    random = np.random.default_rng(3)
    for _ in range(50):
        count = int(random.integers(1, 6))
        weights, tokens = tuple(random.random(count) + 0.01), tuple(random.random(count) * 1000 + 1)
        drawn = BlendShares(("x",) * count, BlendShares(("x",) * count, weights, tokens).token_weights, tokens)
        assert drawn.of_documents == pytest.approx(np.array(weights) / sum(weights))
