"""Data sets whose samples are documents, with Megatron's own blends, splits and sizes.

Megatron's ``GPTDataset`` concatenates documents and cuts the stream every ``--seq-length`` tokens. Here a sample is one
document, or one piece of a document longer than ``--seq-length``: documents are never joined and no token is dropped.
Megatron's ``BlendedMegatronDatasetBuilder`` builds the data sets, so its flags (``--data-path`` with weights,
``--split``, ``--train-data-path``, ``--seed``, the numbers of samples) keep their meaning.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

from bytescale_ext.data.samples.document_samples import DocumentSamples, open_samples
from bytescale_ext.data.samples.epochs import SHUFFLE_LIMIT, KeyedOrder, sample_order
from bytescale_ext.data.samples.idx_file import PART, open_index
from bytescale_ext.data.samples.length_reader import BlendLengths, FileLengths, LengthReader, lengths_in_blend
from bytescale_ext.data.samples.lengths import SampleTable, check_indexed_dataset, sample_table
from bytescale_ext.data.samples.packed import shift_labels
from megatron.bytescale.arguments.options import current, override_current
from megatron.bytescale.arguments.running import OrderOfSamples
from megatron.bytescale.core.datasets.index_cache import build_datasets


@dataclass(frozen=True, slots=True)
class Sample:
    """The location of a sample: tokens [start, start + length) of one document.

    Attributes:
        document: index of the document in its file.
        start: position of the sample's first token in the document.
        length: number of tokens.
        prefix: path of the data set, without ``.idx`` and ``.bin``.
    """

    document: int
    start: int
    length: int
    prefix: str


@dataclass
class DocumentConfig(BlendedMegatronDatasetConfig):
    """Megatron's configuration, plus the order of samples.

    Attributes:
        shuffle_limit: see ``OrderOfSamples``.
    """

    shuffle_limit: int = SHUFFLE_LIMIT

    def in_saved_order(self) -> Self:
        """Return the configuration with the order of the checkpoint that was loaded, which the next one records."""
        order = current(OrderOfSamples)
        override_current(asdict(order))
        config = copy.copy(self)
        config.shuffle_limit = order.hdp_shuffle_limit
        return config


class DocumentDataset(MegatronDataset):
    """The documents of one split of one data set, reshuffled each epoch.

    The data set covers as many whole epochs as ``num_samples`` needs, or one epoch if ``num_samples`` is None or 0. The
    arguments are those that ``MegatronDataset`` takes; ``indices`` is empty (``numel_low_level_dataset``).

    Attributes:
        first_document: first document of the split.
        table: samples of one epoch; document indices in it are relative to the split's first document.
        order: table row of each sample.

    Raises:
        ValueError: samples are requested, but the split has no tokens.
    """

    config: DocumentConfig

    def __init__(
        self,
        dataset: IndexedDataset,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: DocumentConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        num_documents = len(dataset.document_indices) - 1
        share = (0.0, 1.0) if config.blend is None else config.split_matrix[index_split.value]
        self.first_document, end = document_bounds(share, num_documents)
        self.table = self.samples_of(self.first_document, end)
        self.order = sample_order(len(self.table), config.random_seed, index_split.value, config.shuffle_limit)
        self._num_epochs = 0
        self._latest: tuple[int, Sample | None] = (-1, None)
        if len(self.table):
            self._num_epochs = max(1, -(-(num_samples or 0) // len(self.table)))
        elif num_samples is None or num_samples > 0:
            raise ValueError(_empty_split(str(dataset_path), index_split, num_documents))

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Return 0: Megatron would list the documents of each split in every process, 4 bytes each."""
        return 0

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: DocumentConfig) -> IndexedDataset:
        """Open the ``.bin`` and ``.idx`` files with Megatron's reader."""
        return IndexedDataset(dataset_path, multimodal=False, mmap=config.mmap_bin_files)

    def samples_of(self, begin: int, end: int) -> SampleTable | DocumentSamples:
        """Return the samples of the documents [begin, end) of the file."""
        prefix, size = str(self.dataset_path), self.config.sequence_length
        samples = open_samples(prefix, size, cache_folder(self.config)).part(begin, end)
        if len(samples) > self.config.shuffle_limit:
            return samples
        return sample_table(samples.index.part_lengths(begin, end), size)

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples of one epoch."""
        return len(self.table)

    @property
    def num_empty(self) -> int:
        """The number of empty documents in the split; they give no sample."""
        return self.table.num_empty

    def __len__(self) -> int:
        return self._num_epochs * len(self.table)

    def sample(self, i: int) -> Sample:
        """Return the location of sample ``i``. The latest is kept, because a sample is read and then described."""
        known, sample = self._latest
        if known != i or sample is None:
            document, start, length = self.table.place(self._row(i))
            sample = Sample(self.first_document + document, start, length, str(self.dataset_path))
            self._latest = i, sample
        return sample

    def length(self, i: int) -> int:
        """Return the number of tokens of sample ``i``, without reading them."""
        return self.table.place(self._row(i))[2]

    def lengths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the token counts [n] of samples ``indices`` [n]."""
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(self):
            raise IndexError(f"samples {int(wanted.min())}..{int(wanted.max())} of {len(self)}")
        return self.table.lengths(self.order.rows(wanted)) if wanted.size else wanted

    def length_reader(self) -> FileLengths | None:
        """See ``ReadableSource``: another process can read long epochs of documents, which no process holds."""
        table, order = self.table, self.order
        if type(self) is not DocumentDataset or isinstance(table, SampleTable) or not isinstance(order, KeyedOrder):
            return None
        prefix, cache = str(self.dataset_path), cache_folder(self.config)
        return FileLengths(prefix, table.seq_length, cache, table.begin, table.end, table.index.identity, order)

    def read(self, i: int, start: int, stop: int) -> np.ndarray:
        """Read only tokens ``start`` to ``stop`` of sample ``i``, int64 [stop - start].

        ``stop`` may be one past the end of the sample, to include the document's next token. The result is one token
        shorter if the sample ends its document.
        """
        sample = self.sample(i)
        if not 0 <= start <= stop <= sample.length + 1:
            raise IndexError(f"tokens {start}..{stop} of {self.describe(i)}")
        return read_document(self.dataset, sample.document, sample.start + start, sample.start + stop)

    def describe(self, i: int) -> str:
        """Return ``"<prefix>: document 12 tokens 0-4096"``."""
        sample = self.sample(i)
        return f"{sample.prefix}: document {sample.document} tokens {sample.start}-{sample.start + sample.length}"

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Return the whole sample, unpadded, under the keys of Megatron's GPT samples; each tensor is [length]."""
        length = self.length(idx)
        tokens, labels, loss_mask = shift_labels(self.read(idx, 0, length + 1), length)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.arange(length),
        }

    def _row(self, i: int) -> int:
        """Return the table row of sample ``i``. Raises IndexError."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} of {self.dataset_path}")
        return self.order.row(i)


def read_document(dataset: IndexedDataset, document: int, start: int, stop: int) -> np.ndarray:
    """Read only tokens ``start`` to ``stop`` of a document, int64 [stop - start]; fewer if the document is shorter."""
    first_sequence, end_sequence = (int(b) for b in dataset.document_indices[document:][:2])
    num_tokens = int(dataset.sequence_lengths[first_sequence:end_sequence].sum(dtype=np.int64))
    count = min(stop, num_tokens) - start
    if count <= 0:
        return np.zeros(0, dtype=np.int64)
    # The sequences of a document are stored contiguously: a read from the first continues into the next.
    tokens = _read_file(dataset, first_sequence, start, count)
    if tokens is None:
        tokens = dataset.get(first_sequence, offset=start, length=count)
    return tokens.astype(np.int64)


def _read_file(dataset: IndexedDataset, sequence: int, start: int, count: int) -> np.ndarray | None:
    """Read tokens [count] that begin at token ``start`` of a sequence; None unless Megatron maps the file.

    A page fault of the mapped file reads many pages around a short document, which takes up to 18 ms of processor time.
    """
    file = getattr(dataset.bin_reader, "_bin_file_reader", None)
    if not isinstance(file, io.BufferedReader):
        return None
    dtype = np.dtype(dataset.index.dtype)
    place = int(dataset.index[sequence][0]) + start * dtype.itemsize
    read = os.pread(file.fileno(), count * dtype.itemsize, place)
    return np.frombuffer(read, dtype) if len(read) == count * dtype.itemsize else None


class SampleSource:
    """A ``TokenSource`` over one ``DocumentDataset``, or over Megatron's blend of several, in the blend's order."""

    def __init__(self, dataset: DocumentDataset | BlendedDataset) -> None:
        self.dataset = dataset
        if isinstance(dataset, BlendedDataset):
            map_lists(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def sample(self, i: int) -> Sample:
        """Return the location of sample ``i``."""
        dataset, inner = self._locate(i)
        return dataset.sample(inner)

    def length(self, i: int) -> int:
        """Return the number of tokens of sample ``i``, without reading them."""
        dataset, inner = self._locate(i)
        return dataset.length(inner)

    def lengths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the token counts [n] of samples ``indices`` [n]."""
        if isinstance(self.dataset, DocumentDataset):
            return self.dataset.lengths(indices)
        blend, wanted = self.dataset, np.asarray(indices, dtype=np.int64)
        return lengths_in_blend(blend.datasets, blend.dataset_index, blend.dataset_sample_index, wanted)

    def length_reader(self) -> LengthReader | None:
        """See ``ReadableSource``. A blend needs its lists in files (``--data-cache-path``)."""
        if type(self) is not SampleSource:
            return None
        if isinstance(self.dataset, DocumentDataset):
            return self.dataset.length_reader()
        parts = [dataset.length_reader() for dataset in self.dataset.datasets]
        lists = self.dataset.dataset_index, self.dataset.dataset_sample_index
        if not all(isinstance(array, np.memmap) and array.filename for array in lists) or None in parts:
            return None
        return BlendLengths(tuple(parts), *(Path(array.filename) for array in lists))

    def read(self, i: int, start: int, stop: int) -> np.ndarray:
        """Return tokens [stop - start] of sample ``i``; see ``DocumentDataset.read``."""
        dataset, inner = self._locate(i)
        return dataset.read(inner, start, stop)

    def describe(self, i: int) -> str:
        """Return the location of sample ``i`` as text; see ``DocumentDataset.describe``."""
        dataset, inner = self._locate(i)
        return dataset.describe(inner)

    def sequences(self, samples: Sequence[int]) -> Sequence[int]:
        """Return the units that a plan places for these samples: the samples themselves."""
        return samples

    def _locate(self, i: int) -> tuple[DocumentDataset, int]:
        """Return the data set of sample ``i`` in a blend, and the sample's index in that data set."""
        if isinstance(self.dataset, DocumentDataset):
            return self.dataset, i
        if not 0 <= i < len(self.dataset):
            raise IndexError(f"sample {i} of {len(self.dataset)} of a blend")
        dataset = self.dataset.datasets[int(self.dataset.dataset_index[i])]
        return dataset, int(self.dataset.dataset_sample_index[i])


def map_lists(blend: BlendedDataset) -> None:
    """Map the lists of a blend into memory, if this process has written them to ``--data-cache-path``.

    Megatron maps them in all other processes, and keeps 10 bytes a sample in the memory of the process that wrote them.
    """
    folder = blend.config.path_to_cache
    if folder is None:
        return
    stem = f"{blend.unique_description_hash}-{type(blend).__name__}-{blend.split.name}"
    blend.dataset_index = _mapped(blend.dataset_index, Path(folder) / f"{stem}-dataset_index.npy")
    blend.dataset_sample_index = _mapped(blend.dataset_sample_index, Path(folder) / f"{stem}-dataset_sample_index.npy")


def _mapped(array: np.ndarray, path: Path) -> np.ndarray:
    """Return an array [n] from the file that it was saved to, or the array itself without such a file."""
    if isinstance(array, np.memmap) or not path.is_file():
        return array
    mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped if (mapped.shape, mapped.dtype) == (array.shape, array.dtype) else array


def build_document_datasets(
    config: DocumentConfig,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
    kind: type[DocumentDataset] = DocumentDataset,
    count_documents: Callable[[str], int] | None = None,
) -> tuple[SampleSource | None, SampleSource | None, SampleSource | None]:
    """Return the train, validation and test samples from Megatron's builder; None for an unwanted split.

    Collective if ``torch.distributed`` is initialised: Megatron's builder calls barriers, so all ranks must call this
    with equal arguments. Every rank checks files and splits first, so that bad data raises an error on all ranks
    instead of a hang.

    Args:
        config: Megatron's configuration of data sets; ``sequence_length`` is the longest sample.
        sizes: number of samples per split: 0 for no split, None for one epoch.
        is_built_on_rank: whether this rank builds data sets, as in Megatron; if not, all splits are None.
        kind: class of the data sets.
        count_documents: see ``check_splits``.

    Raises:
        ValueError: no data set, a damaged data set, a split without documents, or an option with no meaning here.
    """
    wanted = check_splits(config, sizes, count_documents)
    datasets = build_datasets(kind, sizes, is_built_on_rank, wanted)
    train, valid, test = (None if dataset is None else SampleSource(dataset) for dataset in datasets)
    return train, valid, test


def check_splits[Config: BlendedMegatronDatasetConfig](
    config: Config,
    sizes: Sequence[int | None],
    count_documents: Callable[[str], int] | None = None,
) -> Config:
    """Check options and files without reading tokens; return the configuration with only the wanted splits.

    Args:
        config, sizes: see ``build_document_datasets``.
        count_documents: path -> number of documents in the file; None: check and count Megatron's files.

    Raises:
        ValueError: see ``build_document_datasets``.
    """
    _check_config(config, sizes)
    wanted = copy.copy(config)
    if wanted.blend is None:
        wanted.blend_per_split = _where_wanted(wanted.blend_per_split, sizes)
    else:
        wanted.split_matrix = _where_wanted(wanted.split_matrix, sizes)
    cache = cache_folder(config)
    _check_files(wanted, count_documents or (lambda prefix: check_indexed_dataset(prefix, cache).num_documents))
    return wanted


def _where_wanted(splits: Sequence[Any], sizes: Sequence[int | None]) -> list[Any]:
    return [None if size == 0 else split for split, size in zip(splits, sizes, strict=True)]


def _check_config(config: BlendedMegatronDatasetConfig, sizes: Sequence[int | None]) -> None:
    if config.mock:
        raise ValueError("no data: give --data-path PREFIX (bytescale corpus writes a data set); --mock-data has none")
    if config.multiple_validation_sets:
        raise ValueError("--multiple-validation-sets: document samples have one validation set, blend them instead")
    if config.fast_cache_load or config.defer_npy_index_mmap:
        raise ValueError(
            "--dataloader-fast-cache-load and --dataloader-defer-npy-index-mmap: document samples keep no index "
            "cache, remove the flag"
        )
    for split, size in zip(Split, sizes, strict=True):
        blend = config.blend_per_split[split.value] if config.blend is None else config.blend
        if blend is not None and blend[1] is not None and min(blend[1]) <= 0:
            raise ValueError(f"{split.name}: weights {blend[1]} of {blend[0]}: give weights above 0 only")
        if size is None and blend is not None and blend[1] is not None:
            raise ValueError(
                f"{split.name}: one epoch of a weighted blend is not defined, leave the weights out of the data path "
                "or give a number of samples (no --full-validation)"
            )


def _check_files(config: BlendedMegatronDatasetConfig, count_documents: Callable[[str], int]) -> None:
    """Refuse damaged files and wanted splits without documents."""
    counts: dict[str, int] = {}
    for split, prefixes, share in wanted_parts(config):
        for prefix in prefixes:
            if prefix not in counts:
                counts[prefix] = count_documents(prefix)
            first, end = document_bounds(share, counts[prefix])
            if first >= end:
                raise ValueError(_empty_split(prefix, split, counts[prefix]))


def check_labels(config: BlendedMegatronDatasetConfig) -> None:
    """Refuse wanted splits without any document of two tokens: they have no labels, so their loss would be 0 / 0.

    Args:
        config: the result of ``check_splits``.
    """
    for split, prefixes, share in wanted_parts(config):
        if not any(_has_label(prefix, share) for prefix in prefixes):
            raise ValueError(
                f"{', '.join(prefixes)}: no document of the {split.name} split has two tokens, so none has a label: "
                "use longer documents, another --split, or --eval-iters 0"
            )


def _has_label(prefix: str, share: tuple[float, float]) -> bool:
    """Return whether a document of a share of a data set has two tokens. Stops at the first such document."""
    index = open_index(prefix)
    begin, end = document_bounds(share, index.num_documents)
    return any((index.part_lengths(first, min(first + PART, end)) > 1).any() for first in range(begin, end, PART))


def cache_folder(config: BlendedMegatronDatasetConfig) -> Path | None:
    """Return the folder of the index cache (``--data-cache-path``); None: a folder of each data set."""
    return None if config.path_to_cache is None else Path(config.path_to_cache)


def wanted_parts(config: BlendedMegatronDatasetConfig) -> Iterator[tuple[Split, Sequence[str], tuple[float, float]]]:
    """Yield (split, prefixes of its data sets, (begin, end) share of each data set) for each wanted split."""
    for split in Split:
        if config.blend is None:
            blend, share = config.blend_per_split[split.value], (0.0, 1.0)
        else:
            blend, share = config.blend, config.split_matrix[split.value]
        if blend is not None and share is not None:
            yield split, blend[0], share


def document_bounds(share: tuple[float, float], num_documents: int) -> tuple[int, int]:
    """Return the first document of a share and the end (exclusive), rounded as in Megatron's builder."""
    return round(share[0] * float(num_documents)), round(share[1] * float(num_documents))


def _empty_split(prefix: str, split: Split, num_documents: int) -> str:
    return (
        f"{prefix}: the {split.name} split of its {num_documents} documents holds no token: use more documents, "
        "another --split (say 80,10,10), or --eval-iters 0"
    )
