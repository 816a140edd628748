"""Groups as samples: all documents of a group in a step, cut ends, dropped groups, sidecars, steps in tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale_ext.data.corpus.sidecar import (
    GROUPS,
    VALUES,
    WEIGHTS,
    groups_of,
    weights_of,
    write_header,
)
from bytescale_ext.data.loading.step import samples_within
from bytescale_ext.data.samples.answers import GroupSource, PairSource, RolloutSource, WeightSource
from megatron.bytescale.core.datasets.group_dataset import (
    Groups,
    Pairs,
    Rollouts,
    build_groups,
    check_groups,
    group_config,
)
from megatron.bytescale.core.datasets.step_tokens import samples_that_hold
from megatron.bytescale.features.preferences import check_pairs
from tests.data.sources import write_data_set

MASKS = ["0011", "011", "00000001111", "01", "001", "000", "0000000011", "01"]
PAIRS = [2, 2, 2, 2]


def write(folder: Path, sizes: list[int], masks: list[str] = MASKS, name: str = "a") -> str:
    """Write documents with weights in groups of these sizes; the tokens of the data set are 10, 11, ..."""
    tokens = iter(range(10, 200))
    prefix = write_data_set(folder / name, [[[next(tokens) for _ in mask]] for mask in masks])
    Path(weights_of(prefix) + VALUES).write_bytes(bytes(map(int, "".join(masks))))
    write_header(weights_of(prefix), prefix, WEIGHTS, "uint8")
    np.repeat(np.arange(len(sizes)), sizes).astype(np.int32).tofile(groups_of(prefix) + VALUES)
    write_header(groups_of(prefix), prefix, GROUPS, "int32")
    return prefix


def built(*prefixes: str, length: int = 8) -> Any:
    weights = None if len(prefixes) == 1 else [1.0] * len(prefixes)
    settings = {"random_seed": 1, "sequence_length": length, "blend": (list(prefixes), weights), "split": "100,0,0"}
    config = group_config(prefixes, settings)
    size = None if weights is None else 12
    check_groups(config, [size, 0, 0])
    return config, build_groups(config, [size, 0, 0])[0]


def test_pairs_with_answers_are_samples_of_two_sequences(tmp_path: Path) -> None:
    prefix = write(tmp_path, PAIRS)
    check_pairs(prefix, is_first=True)
    numbers = np.arange(len("".join(MASKS)), dtype=np.float32)
    _, dataset = built(prefix)
    source = Pairs(dataset, {prefix: numbers})
    assert isinstance(source, WeightSource)
    assert isinstance(source, PairSource)
    assert isinstance(source, GroupSource)
    assert not isinstance(source, RolloutSource)
    assert len(source) == 2  # pair 2 has an answer without tokens, the answer of pair 3 is beyond 8 tokens
    firsts = np.cumsum([0, *map(len, MASKS)])
    found = set()
    for sample in range(2):
        for member, number in enumerate(source.sequences((sample,))):
            document = int(source.describe(number).split(": document ")[1].split()[0])
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
    assert Pairs(dataset, {}).reference_sums([0, 1]).tolist() == [0.0, 0.0]


def documents_of(source: Groups, sample: int) -> list[str]:
    names = [source.describe(number).rsplit("/", 1)[1] for number in source.sequences((sample,))]
    return [name.split(" tokens ")[0] for name in names]


def test_groups_of_several_sizes_and_data_sets(tmp_path: Path) -> None:
    prefixes = [write(tmp_path, [3, 1, 4]), write(tmp_path, [1, 1, 1, 1], MASKS[:4], "b")]
    assert [built(prefix)[0].num_groups(prefix) for prefix in prefixes] == [3, 4]
    config, dataset = built(*prefixes)
    numbers = {prefix: np.arange(200, dtype=np.float32) for prefix in prefixes}
    source = Rollouts(dataset, (numbers, {}, numbers))
    assert isinstance(source, RolloutSource)
    wanted = {("a: document 0", "a: document 1", "a: document 2"), ("a: document 3",)}
    wanted |= {(f"b: document {number}",) for number in range(4)}
    assert {tuple(documents_of(source, sample)) for sample in range(len(source))} == wanted
    for sample in range(len(source)):
        members = source.sequences((sample,))
        assert {source.members(number) for number in members} == {members}
        assert source.sample_lengths([sample]).tolist() == [source.lengths(members).sum()]
    sample = next(one for one in range(len(source)) if documents_of(source, one) == ["b: document 1"])
    (number,) = source.sequences((sample,))
    assert source.rollout_numbers(number, 1, 5).tolist() == [[5, 0, 5], [6, 0, 6], [0, 0, 0], [0, 0, 0]]
    assert samples_that_hold(100, config) > 100 / 8


def test_steps_in_tokens_hold_whole_groups(tmp_path: Path) -> None:
    prefix = write(tmp_path, [3, 1, 1], ["0011", "01111", "0011", "011", "0011"])
    source = Groups(built(prefix)[1])
    lengths = source.sample_lengths(range(3))
    assert sorted(lengths.tolist()) == [3, 4, 13]
    fitting = int(np.searchsorted(np.cumsum(lengths), 16, side="right"))
    assert samples_within(16, 0, source) == tuple(range(fitting))
    config = group_config([prefix], {"random_seed": 1, "sequence_length": 8, "blend": ([prefix], None), "split": "1"})
    assert check_groups(config, [None, 0, 0], 13) == []
    with pytest.raises(ValueError, match="a group has 13 tokens, more than the 12 of a step: raise"):
        check_groups(config, [None, 0, 0], 12)


def test_groups_without_answers_are_counted_or_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path, PAIRS)
    settings = {"random_seed": 1, "sequence_length": 8, "blend": ([prefix], None), "split": "1"}
    (line,) = check_groups(group_config([prefix], settings), [None, 0, 0])
    assert line == "> bytescale: train: 2 of 4 groups have an answer in the first 8 tokens of each document"
    with pytest.raises(ValueError, match="no group of the train split has an answer in the first --seq-length 1"):
        check_groups(group_config([prefix], {**settings, "sequence_length": 1}), [None, 0, 0])


def test_what_is_no_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="group 1 has 3 documents and is no pair"):
        check_pairs(write(tmp_path, [2, 3, 2, 1]), is_first=True)


def test_tables_of_shares_are_parts_of_the_whole(tmp_path: Path) -> None:
    prefix = write(tmp_path, [3, 1, 1, 2, 1])
    config = group_config([prefix], {"random_seed": 1, "sequence_length": 8, "blend": ([prefix], None), "split": "1"})
    whole = config.split_table(prefix, (0.0, 1.0))
    assert whole.length.tolist() == [15, 2, 3, 2]
    parts = [config.split_table(prefix, share) for share in ((0.0, 0.4), (0.4, 0.8), (0.8, 1.0))]
    assert [part.length.tolist() for part in parts] == [[15, 2], [3], [2]]
    assert sum(part.num_empty for part in parts) == whole.num_empty == 1
