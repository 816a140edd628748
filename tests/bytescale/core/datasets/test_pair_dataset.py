"""Pairs as samples: both documents of a step, cut ends, dropped pairs, weights and sums of a reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.corpus.sidecar import VALUES, WEIGHTS, weights_of, write_header
from bytescale_ext.data.samples.answers import PairSource, WeightSource
from megatron.bytescale.core.datasets.answer_dataset import answer_config
from megatron.bytescale.core.datasets.pair_dataset import Pairs, build_pairs, check_pairs
from tests.data.sources import write_data_set

MASKS = ["0011", "011", "00000001111", "01", "001", "000", "0000000011", "01"]


def write(folder: Path, masks: list[str] = MASKS) -> str:
    tokens = iter(range(10, 200))
    prefix = write_data_set(folder / "a", [[[next(tokens) for _ in mask]] for mask in masks])
    Path(weights_of(prefix) + VALUES).write_bytes(bytes(map(int, "".join(masks))))
    write_header(weights_of(prefix), prefix, WEIGHTS, "uint8", 2)
    return prefix


def pairs(prefix: str, references: dict[str, np.ndarray]) -> Pairs:
    settings = {"random_seed": 1, "sequence_length": 8, "blend": ([prefix], None), "split": "100,0,0"}
    config = answer_config([prefix], settings)
    check_pairs(config, [None, 0, 0])
    source = build_pairs(config, references, [None, 0, 0])[0]
    assert isinstance(source, Pairs)
    assert isinstance(source, WeightSource)
    assert isinstance(source, PairSource)
    return source


def test_pairs_with_answers_are_samples_of_two_sequences(tmp_path: Path) -> None:
    prefix = write(tmp_path)
    numbers = np.arange(len("".join(MASKS)), dtype=np.float32)
    source = pairs(prefix, {prefix: numbers})
    assert len(source) == 2  # pair 2 has an answer without tokens, the answer of pair 3 is beyond 8 tokens
    firsts = np.cumsum([0, *map(len, MASKS)])
    found = set()
    for sample in range(2):
        for member, number in enumerate(source.sequences((sample,))):
            document = int(source.describe(number).rsplit(" ", 1)[1])
            assert document % 2 == member
            found.add(document)
            mask = [float(mark) for mark in MASKS[document][:8]]
            assert source.length(number) == len(mask)
            assert source.read(number, 0, len(mask)).tolist() == list(
                range(10 + firsts[document], 10 + firsts[document] + len(mask))
            )
            assert source.weights(number, 1, len(mask) + 1).tolist() == [*mask[1:], 0.0]
            labels = sum(numbers[firsts[document] + place] for place, mark in enumerate(mask) if mark and place)
            assert source.reference_sums([number]).tolist() == [labels]
    assert found == {0, 1, 2, 3}
    assert pairs(prefix, {}).reference_sums([0, 1]).tolist() == [0.0, 0.0]


def test_a_document_without_its_partner_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="7 documents, so one has no partner"):
        pairs(write(tmp_path, MASKS[:7]), {})
