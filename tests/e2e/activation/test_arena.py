"""Activations that do not fit in the host arena stay on the device, and a single warning says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.activation.test_activations import CASES, counts, digests, outcomes_of, train_and_digest
from tests.e2e.corpora import write_documents
from tests.e2e.training import train_ranks

pytestmark = pytest.mark.ranks


def train_with_a_quarter_of_the_arena() -> None:
    """Entry with forecast budgets that are too small, as if a layer saved an unexpected tensor."""
    from megatron.bytescale.features.activations import build as activations

    allocate = activations.allocate_arena
    activations.allocate_arena = lambda num_bytes, pinned: allocate(num_bytes // 4, pinned=pinned)
    train_and_digest()


@pytest.mark.full
def test_an_arena_that_is_too_small_keeps_the_rest_on_the_device(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "docs")
    num_ranks, words = CASES["hdp"]
    flags = [*words, "--data-path", corpus, "--swap-fraction", "1", "--host-memory-gb", "0.002"]
    plain = outcomes_of("hdp", corpus)
    planned = train_ranks(num_ranks, *flags, entry=train_with_a_quarter_of_the_arena)
    for one, other in zip(plain, planned, strict=True):
        assert digests(other) == digests(one) != []
        assert counts(other)["overflowed_bytes"] > 0
        assert 0 < counts(other)["peak"] <= 0.0005e9
        assert other.text.count("the host arena of 0.0005 GB is full") == 1
