"""A run with steps of tokens has enough samples, for any start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.bytescale.core.datasets.document_dataset import DocumentConfig, build_document_datasets
from megatron.bytescale.core.datasets.step_tokens import samples_that_hold
from tests.data.sources import write_data_set

LENGTHS = {"short": (1, 2, 1, 60, 3, 1), "long": (70, 9, 100, 33)}


@pytest.mark.parametrize("weights", [None, [0.2, 0.8], [0.95, 0.05]], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 64, 1000])
def test_the_samples_hold_the_tokens(num_tokens: int, weights: list[float] | None, tmp_path: Path) -> None:
    prefixes = [
        write_data_set(tmp_path / name, [[[1] * length] for length in lengths]) for name, lengths in LENGTHS.items()
    ]
    blend = prefixes[:1] if weights is None else prefixes, weights
    config = DocumentConfig(random_seed=1, sequence_length=64, blend=blend, split="100,0,0")
    wanted = samples_that_hold(num_tokens, config)
    source = build_document_datasets(config, [20 + wanted, 0, 0], lambda: True)[0]
    assert source is not None
    tokens = np.cumsum([0, *(source.length(sample) for sample in range(20 + wanted))])
    assert (tokens[wanted:] - tokens[:21] >= num_tokens).all()
    assert wanted <= 40 * num_tokens + 40
