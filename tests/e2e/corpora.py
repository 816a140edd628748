"""Data sets of random documents in Megatron's format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.e2e.once import once
from tests.harness import run_ranks

VOCAB = 61
# Rings of 4, 3, 2 and 1 ranks at C = 64, packs, and documents of one and two tokens.
LENGTHS = (256, 3, 190, 130, 1, 17, 64, 40, 2, 100, 33, 65, 129, 8, 20, 50, 9, 193, 300, 5, 77, 12, 31, 600)


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 0, copies: int = 4) -> Path:
    """Return the prefix of a data set of ``write_documents``, which is written once in a test session.

    Runs must not change it. Runs that write Megatron's sample index next to the data set need their own copy.
    """
    return once(
        lambda folder: write_documents(folder / "docs", lengths, seed, copies), "documents", lengths, seed, copies
    )


def write_documents(prefix: Path, lengths: Sequence[int] = LENGTHS, seed: int = 0, copies: int = 4) -> Path:
    """Write random documents in Megatron's format: ``copies`` times the lengths, with new tokens each time."""
    from bytescale_ext.data.samples.lengths import read_idx_lengths

    run_ranks(_write, 1, str(prefix), tuple(lengths) * copies, seed, init_group=False)
    assert read_idx_lengths(prefix).tolist() == list(lengths) * copies
    return prefix


def _write(rank: int, world: int, prefix: str, lengths: Sequence[int], seed: int) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in lengths:
        builder.add_document(generator.integers(0, VOCAB, length), [length])
    builder.finalize(f"{prefix}.idx")
