"""Windows as samples, through Megatron's own builder: their tokens, labels and attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.utils import Split

from bytescale_ext.data.loading.loader import StepLoader
from bytescale_ext.data.loading.planning import PlanMaker
from bytescale_ext.data.loading.step import LoaderSettings
from bytescale_ext.plan.sculpt.pieces import ROW
from megatron.bytescale.core.datasets.document_dataset import SampleSource, check_splits
from megatron.bytescale.core.datasets.window_dataset import (
    DocumentsOfWindows,
    WindowConfig,
    WindowDataset,
    WindowedDocuments,
    WindowSamples,
    build_windows,
)
from tests.data.sources import write_data_set
from tests.plan.simple_plans import plan_naive

# Documents of 4, 7, 0, 3 and 9 tokens: ids 10.., 20.., 40.., 50..; the second document has two sequences.
DOCUMENTS = [
    [list(range(10, 14))], [list(range(20, 24)), list(range(24, 27))], [], [list(range(40, 43))],
    [list(range(50, 59))],
]  # fmt: skip
ROWS = [(0, 0, 0, 4), (0, 3, 0, 3), (1, 1, 0, 5), (2, 1, 5, 2), (2, 4, 0, 6), (3, 4, 6, 3)]
TABLE = np.array(ROWS, dtype=ROW)
WINDOWS = [[10, 11, 12, 13, 40, 41, 42], [20, 21, 22, 23, 24], [25, 26, 50, 51, 52, 53, 54, 55], [56, 57, 58]]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_data_set(tmp_path / "a", DOCUMENTS)


def config_of(tables: dict[str, np.ndarray], attention: str = "window", **options: object) -> WindowConfig:
    options.setdefault("blend", (list(tables), None))
    options.setdefault("split", "100,0,0")
    return WindowConfig(random_seed=5, sequence_length=8, tables=tables, attention=attention, **options)  # type: ignore[arg-type]


def source_of(prefix: str, attention: str, num_samples: int | None = None) -> SampleSource:
    source, _, _ = build_windows(config_of({prefix: TABLE}, attention), [num_samples, 0, 0])
    assert source is not None
    return source


def samples_of(prefix: str, attention: str) -> WindowSamples:
    config = config_of({prefix: TABLE}, attention)
    low = WindowSamples.build_low_level_dataset(prefix, config)
    return WindowSamples(low, prefix, np.arange(4), None, Split.train, config)


def test_a_sample_is_a_window(prefix: str) -> None:
    source = source_of(prefix, "window")
    assert isinstance(source.dataset, WindowDataset)
    assert isinstance(source.dataset.dataset, WindowedDocuments)
    assert len(source) == 4
    assert source.sequences((2, 0)) == (2, 0)
    found = {source.describe(i): source.read(i, 0, source.length(i) + 1).tolist() for i in range(4)}
    assert found == {f"{prefix}: window {number}": tokens for number, tokens in enumerate(WINDOWS)}


def test_documents_of_a_window_are_shuffled_anew_in_each_epoch(prefix: str) -> None:
    table = np.array([(0, 0, place, 1) for place in range(4)] + [(1, 1, place, 1) for place in range(7)], dtype=ROW)
    config = config_of({prefix: table}, shuffled=frozenset([prefix]))
    source, _, _ = build_windows(config, [10, 0, 0])
    assert source is not None
    by_window: dict[int, list[list[int]]] = {0: [], 1: []}
    for i in range(10):
        by_window[source.sample(i).document].append(source.read(i, 0, source.length(i)).tolist())
    for window, tokens in ((0, [10, 11, 12, 13]), (1, [20, 21, 22, 23, 24, 25, 26])):
        assert [sorted(one) for one in by_window[window]] == [tokens] * 5
        assert len({tuple(one) for one in by_window[window]}) > 1
    again, _, _ = build_windows(config, [10, 0, 0])
    assert again is not None
    assert [again.read(i, 0, 9).tolist() for i in range(10)] == [source.read(i, 0, 9).tolist() for i in range(10)]


def test_parts_of_windows(prefix: str) -> None:
    source = source_of(prefix, "window")
    for i in range(4):
        whole = WINDOWS[source.sample(i).document]
        for start in range(len(whole) + 1):
            for stop in range(start, len(whole) + 2):
                assert source.read(i, start, stop).tolist() == whole[start:stop]


def test_documents_of_windows_are_sequences(prefix: str) -> None:
    windows, source = source_of(prefix, "window"), source_of(prefix, "document")
    assert isinstance(source, DocumentsOfWindows)
    assert len(source) == 4
    for i in range(4):
        rows = [row for row in ROWS if row[0] == windows.sample(i).document]
        sequences = source.sequences((i,))
        assert [source.length(one) for one in sequences] == [length for *_, length in rows]
        for one, (window, document, start, length) in zip(sequences, rows, strict=True):
            tokens = [token for part in DOCUMENTS[document] for token in part]
            assert source.read(one, 0, length + 1).tolist() == tokens[start : start + length + 1]
            assert source.read(one, 1, length).tolist() == tokens[start + 1 : start + length]
            assert (
                source.describe(one)
                == f"{prefix}: window {window}, document {document} tokens {start}-{start + length}"
            )
    assert len(set(source.sequences((0, 1, 2, 3)))) == len(ROWS)


def test_windows_for_megatrons_own_training(prefix: str) -> None:
    samples = samples_of(prefix, "window")
    (place,) = (i for i in range(4) if samples.sample(i).document == 0)
    sample = {name: values.tolist() for name, values in samples[place].items()}
    assert sample == {
        "tokens": [*WINDOWS[0], 0],
        "labels": [*WINDOWS[0][1:], 0, 0],
        "loss_mask": [1, 1, 1, 1, 1, 1, 0, 0],
        "position_ids": list(range(8)),
    }


def test_documents_are_kept_apart_by_a_mask(prefix: str) -> None:
    samples = samples_of(prefix, "document")
    (place,) = (i for i in range(4) if samples.sample(i).document == 2)
    sample = samples[place]
    assert sample["tokens"].tolist() == WINDOWS[2]
    assert sample["labels"].tolist() == [26, 0, 51, 52, 53, 54, 55, 56]
    assert sample["loss_mask"].tolist() == [1, 0, 1, 1, 1, 1, 1, 1]
    assert sample["position_ids"].tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert sample["attention_mask"].shape == (1, 8, 8)
    document = [0, 0, 1, 1, 1, 1, 1, 1]
    for query, row in enumerate(sample["attention_mask"][0].tolist()):
        assert row == [not (key <= query and document[key] == document[query]) for key in range(8)]


def test_splits_cut_between_windows(prefix: str) -> None:
    config = config_of({prefix: TABLE}, split="50,50,0")
    assert config.num_windows(prefix) == 4
    train, valid, test = build_windows(config, [None, None, 0])
    assert train is not None
    assert valid is not None
    assert test is None
    found = [sorted(source.sample(i).document for i in range(len(source))) for source in (train, valid)]
    assert found == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="the valid split of its 4 documents holds no token"):
        check_splits(config_of({prefix: TABLE}, split="99,1,0"), [1, 1, 0], config.num_windows)


@pytest.mark.parametrize("attention", ["window", "document"])
def test_the_loader_plans_what_attends_to_itself(attention: str, tmp_path: Path) -> None:
    prefixes = [write_data_set(tmp_path / name, DOCUMENTS) for name in "ab"]
    tables = {prefixes[0]: TABLE, prefixes[1]: TABLE[:3]}
    config = config_of(tables, attention, blend=(prefixes, [0.5, 0.5]))
    source, _, _ = build_windows(config, [8, 0, 0])
    assert source is not None

    def steps(consumed: int) -> list[tuple[Sequence[int], Sequence[int], list[int]]]:
        settings = LoaderSettings(1, samples_per_step=4, consumed_samples=consumed)
        loader = StepLoader(source, PlanMaker(lambda lengths: plan_naive(lengths, 2, 8)), settings, source.sequences)
        made = [next(loader), next(loader)] if not consumed else [next(loader)]
        assert loader.state_dict()["consumed_samples"] == 8
        loader.close()
        return [
            (step.sample_ids, step.lengths, [token for one in step.micro_batches for token in one.tokens.tolist()])
            for step in made
        ]

    first, second = steps(0)
    assert steps(4) == [second]
    for sample_ids, lengths, _ in (first, second):
        assert len(sample_ids) == 4
        sequences = source.sequences(tuple(sample_ids))
        assert list(lengths) == [source.length(one) for one in sequences]
        assert (len(sequences) > 4) == (attention == "document")
