"""Conversations as samples: ends, answers and skipped conversations, against lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.data.corpus.sidecar import VALUES, WEIGHTS, weights_of, write_header
from bytescale_ext.data.samples.answers import WeightSource
from megatron.bytescale.core.datasets.answer_dataset import (
    AnswerConfig,
    AnswerDataset,
    Conversations,
    answer_config,
    build_conversations,
    check_answers,
)
from megatron.bytescale.core.datasets.document_dataset import check_splits
from tests.data.sources import write_data_set

# A digit is a token; 1 is an answer. With 8 tokens two documents have no answer, and two are cut off.
MASKS = {"a": ["0011", "1000", "00000001111", "0000000011", "01"], "b": ["0001", "00110011"]}


def write(folder: Path, name: str) -> str:
    masks = MASKS[name]
    first = 10 if name == "a" else 100
    tokens = iter(range(first, first + 200))
    prefix = write_data_set(folder / name, [[[next(tokens) for _ in mask]] for mask in masks])
    Path(weights_of(prefix) + VALUES).write_bytes(bytes(map(int, "".join(masks))))
    write_header(weights_of(prefix), prefix, WEIGHTS, "uint8")
    return prefix


def config_of(prefixes: list[str], weights: list[float] | None = None, split: str = "100,0,0") -> AnswerConfig:
    settings = {"random_seed": 1, "sequence_length": 8, "blend": (prefixes, weights), "split": split}
    return answer_config(prefixes, settings)


def samples(config: AnswerConfig, number: int | None = None) -> Conversations:
    source = build_conversations(config, [number, 0, 0])[0]
    assert isinstance(source, Conversations)
    assert isinstance(source, WeightSource)
    return source


def test_an_epoch_holds_each_conversation_with_an_answer_once(tmp_path: Path) -> None:
    source = samples(config_of([write(tmp_path, "a")]))
    assert len(source) == 3
    found = {source.sample(i).document: i for i in range(3)}
    assert found.keys() == {0, 2, 4}
    for document, i in found.items():
        mask = MASKS["a"][document]
        assert source.length(i) == min(len(mask), 8)
        whole = [int(mark) == 1 for mark in mask[:8]]
        assert source.weights(i, 0, 8).tolist() == [*whole, *[False] * (8 - len(whole))]
        assert source.weights(i, 1, 3).tolist() == [*whole[1:3], *[False] * (3 - len(whole))][:2]
        assert source.weights(i, 8, 9).tolist() == [False], "a label after the end"
    assert isinstance(source.dataset, AnswerDataset)
    assert source.dataset.num_empty == 2


def test_a_whole_sample_under_the_keys_of_megatron(tmp_path: Path) -> None:
    source = samples(config_of([write(tmp_path, "a")]))
    for i in range(3):
        sample = source.dataset[i]
        marks = [int(mark) for mark in MASKS["a"][source.sample(i).document][:8]]
        assert sample["loss_mask"].tolist() == [*marks[1:], 0]
        assert sample["labels"][:-1].tolist() == sample["tokens"][1:].tolist()


def test_splits_and_blends_know_their_own_masks(tmp_path: Path) -> None:
    prefixes = [write(tmp_path, name) for name in ("a", "b")]
    source = samples(config_of(prefixes, [0.5, 0.5]), 40)
    seen = set()
    for i in range(40):
        place = source.sample(i)
        mask = MASKS[Path(place.prefix).name][place.document]
        seen.add((Path(place.prefix).name, place.document))
        assert source.weights(i, 0, place.length).tolist() == [mark == "1" for mark in mask[: place.length]]
    assert seen == {("a", 0), ("a", 2), ("a", 4), ("b", 0), ("b", 1)}
    train, valid, _ = build_conversations(config_of(prefixes[:1], split="60,40,0"), [None, 1, 0])
    assert isinstance(train, Conversations)
    assert isinstance(valid, Conversations)
    assert {train.sample(i).document for i in range(len(train))} == {0, 2}
    assert [valid.sample(i).document for i in range(len(valid))] == [4]
    assert valid.weights(0, 0, 2).tolist() == [False, True]


def test_what_is_left_out_is_told_and_splits_without_answers_are_refused(tmp_path: Path) -> None:
    prefixes = [write(tmp_path, name) for name in ("a", "b")]
    (line,) = check_answers(check_splits(config_of(prefixes[:1]), [None, 0, 0]))
    assert "train: 3 of 5 conversations have an answer in their first 8 tokens; 2 are cut there" in line
    assert check_answers(check_splits(config_of(prefixes[1:]), [None, 0, 0])) == []
    split = check_splits(config_of(prefixes[:1], split="60,20,20"), [None, 1, 0])
    with pytest.raises(ValueError, match="no conversation of the valid split has an answer in its first --seq-len"):
        check_answers(split)
