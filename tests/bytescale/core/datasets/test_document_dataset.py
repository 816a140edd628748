"""Document samples through Megatron's own builder, on files written by Megatron's own writer."""

import os
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from bytescale_ext.data.loading.loader import StepLoader
from bytescale_ext.data.loading.planning import PlanMaker
from bytescale_ext.data.loading.step import LoaderSettings
from bytescale_ext.data.samples import length_reader
from bytescale_ext.data.samples.document_samples import DocumentSamples
from bytescale_ext.data.samples.length_reader import StepLengths
from bytescale_ext.data.samples.lengths import check_indexed_dataset, read_idx_lengths
from bytescale_ext.plan.step.numbers import Numbers
from megatron.bytescale.core.datasets.document_dataset import (
    DocumentConfig,
    DocumentDataset,
    SampleSource,
    build_document_datasets,
)
from tests.plan.simple_plans import plan_naive

LENGTHS = [5, 17, 0, 1, 40, 8, 9, 23, 2, 16]
SEQ_LENGTH = 8


def _write(prefix: Path, lengths: Sequence[int], dtype: type = np.uint16, first: int = 1) -> str:
    """Write documents of consecutive token ids with Megatron's writer."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for length in lengths:
        builder.add_document(np.arange(first, first + length), [length])
        first += length
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def _config(seq_length: int = SEQ_LENGTH, seed: int = 1234, **options: object) -> DocumentConfig:
    if "blend_per_split" not in options:
        options.setdefault("split", "100,0,0")
    return DocumentConfig(random_seed=seed, sequence_length=seq_length, **options)  # type: ignore[arg-type]


def _build(sizes: Sequence[int | None], **options: object) -> tuple[SampleSource | None, ...]:
    return build_document_datasets(_config(**options), sizes, lambda: True)  # type: ignore[arg-type]


def _dataset(prefix: str, num_samples: int | None, **options: object) -> DocumentDataset:
    source = _build([num_samples, 0, 0], blend=([prefix], None), **options)[0]
    assert source is not None
    assert isinstance(source.dataset, DocumentDataset)
    return source.dataset


@pytest.fixture
def prefix(tmp_path: Path) -> Iterator[str]:
    return _write(tmp_path / "a", LENGTHS)


def _tokens(dataset: DocumentDataset, samples: Sequence[int]) -> Counter[tuple[int, int]]:
    return Counter(
        (sample.document, token)
        for sample in map(dataset.sample, samples)
        for token in range(sample.start, sample.start + sample.length)
    )


def test_an_epoch_holds_each_token_once_in_pieces_of_documents(prefix: str) -> None:
    dataset = _dataset(prefix, None)
    assert len(dataset) == dataset.samples_per_epoch == sum(-(-length // SEQ_LENGTH) for length in LENGTHS)
    assert dataset.num_empty == 1
    expected = Counter((document, token) for document, n in enumerate(LENGTHS) for token in range(n))
    assert _tokens(dataset, range(len(dataset))) == expected
    assert dataset.sample(0).prefix == prefix


def test_the_order_does_not_depend_on_how_many_samples_are_asked_for(prefix: str) -> None:
    long = _dataset(prefix, 100)
    for num_samples in (None, 1, 7, 33, 99):
        dataset = _dataset(prefix, num_samples)
        assert [dataset.sample(i) for i in range(len(dataset))] == [long.sample(i) for i in range(len(dataset))]


def test_the_order_is_frozen(tmp_path: Path) -> None:
    """A changed order would break resuming from every checkpoint, so this list must never change."""
    dataset = _dataset(_write(tmp_path / "b", [1] * 6), 12)
    assert [dataset.sample(i).document for i in range(12)] == [0, 4, 2, 3, 5, 1, 0, 5, 1, 4, 3, 2]


def test_lengths_are_those_of_the_samples_and_no_token_is_read(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = _dataset(prefix, 100)
    monkeypatch.setattr(IndexedDataset, "get", None)
    expected = [dataset.sample(i).length for i in range(len(dataset))]
    assert [dataset.length(i) for i in range(len(dataset))] == expected
    assert dataset.lengths(range(len(dataset))).tolist() == expected
    assert dataset.lengths([70, 3, 3, 41]).tolist() == [expected[i] for i in (70, 3, 3, 41)]
    assert dataset.lengths([]).tolist() == []


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_tokens_read_are_those_of_the_document(tmp_path: Path, dtype: type) -> None:
    prefix = _write(tmp_path / "a", LENGTHS, dtype)
    assert check_indexed_dataset(prefix).dtype == np.dtype(dtype)
    assert read_idx_lengths(prefix).tolist() == LENGTHS
    dataset = _dataset(prefix, None)
    first = np.cumsum([1, *LENGTHS])
    for i in range(len(dataset)):
        sample = dataset.sample(i)
        begin = first[sample.document] + sample.start
        end = first[sample.document + 1]
        for start, stop in ((0, sample.length), (0, sample.length + 1), (sample.length, sample.length + 1), (0, 0)):
            read = dataset.read(i, start, stop)
            assert read.dtype == np.int64
            assert read.tolist() == list(range(begin + start, min(begin + stop, end)))
        with pytest.raises(IndexError, match=f"document {sample.document}"):
            dataset.read(i, 0, sample.length + 2)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_only_the_asked_tokens_are_read_from_the_file(
    prefix: str, is_mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that Megatron maps is read without page faults; else Megatron reads it."""
    dataset = _dataset(prefix, None)
    reader, counts, pread = dataset.dataset.bin_reader, [], os.pread
    file = reader._bin_file_reader
    itemsize = np.dtype(dataset.dataset.index.dtype).itemsize

    def read(dtype: type, count: int, offset: int) -> np.ndarray:
        counts.append(("Megatron", count))
        return np.frombuffer(pread(file.fileno(), count * itemsize, offset), dtype)

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        counts.append(("file", size // itemsize))
        return pread(descriptor, size, offset)

    i = next(i for i in range(len(dataset)) if dataset.length(i) == 8)
    expected = dataset.read(i, 2, 5).tolist()
    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(reader, "read", read)
    if not is_mapped:
        monkeypatch.setattr(reader, "_bin_file_reader", None)
    assert dataset.read(i, 2, 5).tolist() == expected
    assert counts == [("file" if is_mapped else "Megatron", 3)]


def test_documents_of_several_sequences_are_one(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32)
    builder.add_document(np.arange(6), [1, 3, 2])
    builder.add_item(torch.arange(6, 10))
    builder.add_item(torch.arange(10, 15))
    builder.end_document()
    builder.end_document()
    builder.finalize(str(tmp_path / "a.idx"))
    dataset = _dataset(str(tmp_path / "a"), None, seq_length=5)
    assert read_idx_lengths(tmp_path / "a").tolist() == [6, 9, 0]
    read = {
        (s.document, s.start): dataset.read(i, 0, s.length + 1).tolist() for i in range(4) for s in [dataset.sample(i)]
    }
    assert read == {(0, 0): [0, 1, 2, 3, 4, 5], (0, 5): [5], (1, 0): [6, 7, 8, 9, 10, 11], (1, 5): [11, 12, 13, 14]}


def test_the_split_cuts_between_documents(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "a", list(range(1, 21)))
    sources = _build([100, 10, 10], blend=([prefix], None), split="80,10,10")
    found = [{s.sample(i).document for i in range(len(s))} for s in sources if s is not None]
    assert found == [set(range(16)), {16, 17}, {18, 19}]


def test_a_split_of_which_nothing_is_wanted_is_not_built(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "a", [4, 4])
    train, valid, test = _build([3, 0, 0], blend=([prefix], None), split="969,30,1")
    assert train is not None
    assert valid is None
    assert test is None
    with pytest.raises(ValueError, match=r"a: the valid split of its 2 documents .*--split"):
        _build([3, 1, 0], blend=([prefix], None), split="969,30,1")


def test_a_split_of_empty_documents_alone_is_refused(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "a", [4, 4, 0])
    with pytest.raises(ValueError, match="valid split"):
        _build([3, 1, 0], blend=([prefix], None), split="67,33,0")


def test_weights_blend_as_megatron_blends(tmp_path: Path) -> None:
    prefixes = [_write(tmp_path / "a", [3] * 10), _write(tmp_path / "b", [5] * 10, first=500)]
    source = _build([400, 0, 0], blend=(prefixes, [1.0, 3.0]))[0]
    assert source is not None
    assert isinstance(source.dataset, BlendedDataset)
    assert len(source) == 400
    samples = [source.sample(i) for i in range(400)]
    assert Counter(sample.prefix for sample in samples) == {prefixes[0]: 100, prefixes[1]: 300}
    assert all(source.length(i) == (3 if sample.prefix == prefixes[0] else 5) for i, sample in enumerate(samples))
    for i in (0, 1, 2, 399):
        sample, item = samples[i], source.dataset[i]
        assert source.read(i, 0, sample.length).tolist() == item["tokens"].tolist()
        assert source.describe(i) == f"{sample.prefix}: document {sample.document} tokens 0-{sample.length}"
    # The heavy data set runs through 30 epochs of 10 documents.
    documents = [sample.document for sample in samples if sample.prefix == prefixes[1]]
    assert all(sorted(documents[i : i + 10]) == list(range(10)) for i in range(0, 300, 10))
    with pytest.raises(IndexError, match="sample 400 of 400"):
        source.length(400)


def test_a_blend_has_the_same_beginning_whatever_its_size(tmp_path: Path) -> None:
    prefixes = [_write(tmp_path / "a", [3] * 7), _write(tmp_path / "b", [5] * 11)]
    orders = []
    for size in (30, 300):
        source = _build([size, 0, 0], blend=(prefixes, [0.3, 0.7]))[0]
        assert source is not None
        orders.append([source.sample(i) for i in range(30)])
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({}, [1, 0, 0], "give --data-path"),
        ({"blend": (["A"], [0.0])}, [1, 0, 0], "weights above 0"),
        ({"blend": (["A"], [1.0])}, [None, 0, 0], "one epoch of a weighted blend"),
        ({"blend": (["A"], None), "multiple_validation_sets": True}, [1, 0, 0], "--multiple-validation-sets"),
        ({"blend": (["A"], None)}, [1, 0, 0], r"A\.idx: no such file"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_built(
    options: dict[str, object], sizes: list[int | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _build(sizes, **options)


def test_a_cache_of_blended_indices_is_used_and_gives_the_same(tmp_path: Path) -> None:
    prefixes = [_write(tmp_path / "a", [3] * 7), _write(tmp_path / "b", [5] * 11)]
    cache = tmp_path / "cache"
    orders = []
    for _ in range(2):
        source = _build([50, 0, 0], blend=(prefixes, [0.3, 0.7]), path_to_cache=str(cache))[0]
        assert source is not None
        orders.append([source.sample(i) for i in range(50)])
    assert orders[0] == orders[1]
    assert list(cache.glob("*BlendedDataset*.npy"))


def test_the_loader_runs_on_a_blend(tmp_path: Path) -> None:
    prefixes = [_write(tmp_path / "a", [3, 30, 9]), _write(tmp_path / "b", [5, 14, 1], first=100)]
    source = _build([12, 0, 0], blend=(prefixes, [0.5, 0.5]), seq_length=16)[0]
    assert source is not None
    plans = PlanMaker(lambda lengths: plan_naive(lengths, 2, 8))
    loader = StepLoader(source, plans, LoaderSettings(1, samples_per_step=4, vocab_size=200))
    for step in loader:
        assert step.lengths == tuple(source.length(i) for i in step.sample_ids)
        for packed in step.micro_batches:
            expected = [
                source.read(step.sample_ids[shard.seq], start, stop).tolist()
                for shard in packed.micro_batch.shards
                for start, stop in shard.ranges
            ]
            assert packed.tokens.tolist() == [token for part in expected for token in part]
    assert loader.state_dict()["consumed_samples"] == len(source) // 4 * 4


def test_samples_of_a_long_epoch_are_found_without_a_table(tmp_path: Path) -> None:
    lengths = [*LENGTHS, 0, 31, 7, 0]
    prefixes = [_write(tmp_path / "a", lengths), _write(tmp_path / "b", [9] * 30)]
    source = _build([200, 0, 0], blend=(prefixes, [0.7, 0.3]), shuffle_limit=0)[0]
    assert source is not None
    dataset = source.dataset.datasets[0]
    assert isinstance(dataset.table, DocumentSamples)
    assert dataset.num_empty == lengths.count(0)
    expected = Counter((document, token) for document, n in enumerate(lengths) for token in range(n))
    for epoch in range(2):
        size = dataset.samples_per_epoch
        assert _tokens(dataset, range(epoch * size, epoch * size + size)) == expected
    assert source.lengths(range(200)).tolist() == [source.length(i) for i in range(200)]
    for i in range(200):
        sample = source.sample(i)
        assert source.read(i, 0, sample.length).tolist() == source.dataset[i]["tokens"].tolist()


def test_splits_of_a_long_epoch_hold_their_documents(tmp_path: Path) -> None:
    lengths = [0, 3, 20, 0, 0, 8, 9, 1, 30, 0, 2, 17, 0, 4]
    prefix = _write(tmp_path / "a", lengths)
    sources = _build([None, None, None], blend=([prefix], None), split="30,40,30", shuffle_limit=0)
    documents = Counter[int]()
    for source in sources:
        assert source is not None
        for i in range(len(source)):
            sample = source.sample(i)
            documents[sample.document] += sample.length
    assert documents == {document: length for document, length in enumerate(lengths) if length}
    first = sources[1]
    assert first is not None
    assert {first.sample(i).document for i in range(len(first))} <= set(range(4, 10))


@pytest.mark.parametrize("num_sets", [1, 2])
def test_another_process_reads_the_lengths_of_long_epochs(tmp_path: Path, num_sets: int) -> None:
    prefixes = [_write(tmp_path / "a", LENGTHS), _write(tmp_path / "b", [9] * 30)][:num_sets]
    options = {"shuffle_limit": 0, "path_to_cache": str(tmp_path / "cache")}
    source = _build([200, 0, 0], blend=(prefixes, [0.7, 0.3][:num_sets]), **options)[0]
    assert source is not None
    reader = source.length_reader()
    assert reader is not None
    there = pickle.loads(pickle.dumps(StepLengths(reader, Numbers(range(20, 200)))))
    assert not there.is_read
    assert len(there) == 180
    assert there.numbers == tuple(there) == tuple(source.length(i) for i in range(20, 200))
    assert there[3] == source.length(23)
    touched = Path(prefixes[0] + ".idx")
    os.utime(touched, ns=(1, 1))
    length_reader._opened.cache_clear()
    with pytest.raises(ValueError, match=f"{touched}: changed while it was read"):
        reader.lengths(np.arange(3))


def test_only_this_process_knows_the_lengths_of_short_epochs_and_lists_in_memory(tmp_path: Path) -> None:
    prefixes = [_write(tmp_path / "a", LENGTHS), _write(tmp_path / "b", [9] * 30)]
    for options in ({"path_to_cache": str(tmp_path / "cache")}, {"shuffle_limit": 0}):
        source = _build([200, 0, 0], blend=(prefixes, [0.7, 0.3]), **options)[0]
        assert source is not None
        assert source.length_reader() is None


def test_a_run_resumes_in_its_order(prefix: str) -> None:
    """The order does not depend on the samples that are asked for, so a resumed run continues in it."""
    long = _dataset(prefix, 100, shuffle_limit=0)
    again = _dataset(prefix, 37, shuffle_limit=0)
    assert [again.sample(i) for i in range(20, 37)] == [long.sample(i) for i in range(20, 37)]
