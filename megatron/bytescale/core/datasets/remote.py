"""Connects the Ray loader to Megatron: servers run its tokenizer, and its blends and splits order the samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.utils import Split
from megatron.training.config import TokenizerConfig

from bytescale_ext.config.remote import RemoteConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.data.ray.actors import RemoteActors, RemoteAddress, RemoteServers, RemoteText, join_actors
from bytescale_ext.data.ray.lines import LineIndex, is_plain, unpacked
from bytescale_ext.data.ray.loader import RemoteSplit
from bytescale_ext.data.ray.scheduler import FileSamples, MakePlan, Samples, SplitSamples
from bytescale_ext.data.ray.session import check_remote
from bytescale_ext.data.samples.lengths import SampleTable, sample_table
from bytescale_ext.data.samples.records import MOST_BYTES
from bytescale_ext.data.samples.texts import BYTE_LEVEL_VOCAB_SIZE, Encode, encoder
from megatron.bytescale.core.datasets.corpus import build_megatron_tokenizer
from megatron.bytescale.core.datasets.document_dataset import (
    DocumentConfig,
    DocumentDataset,
    SampleSource,
    build_document_datasets,
    check_splits,
)

if TYPE_CHECKING:
    from megatron.bytescale.arguments.data import DataArguments

_TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")


@dataclass(frozen=True, eq=False)
class LineDocuments:
    """The part of Megatron's reader that a ``DocumentDataset`` needs to order samples; each document is one sequence.

    Attributes:
        sequence_lengths: number of tokens of each document, [n].
        document_indices: 0, 1, ..., n, [n + 1].
    """

    sequence_lengths: np.ndarray
    document_indices: np.ndarray


@dataclass
class LineDatasetConfig(DocumentConfig):
    """Megatron's configuration, plus the line index of each file, keyed by path."""

    lines: dict[str, LineIndex] = field(default_factory=dict)


class LineDataset(DocumentDataset):
    """The sample order of a JSONL file, from ``LineIndex.table_lengths``; it reads no text."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: LineDatasetConfig) -> LineDocuments:  # type: ignore[override]
        """Return the documents of one file."""
        lengths = config.lines[dataset_path].table_lengths
        return LineDocuments(lengths, np.arange(len(lengths) + 1))

    def samples_of(self, begin: int, end: int) -> SampleTable:
        """Return the samples of the documents [begin, end)."""
        return sample_table(self.dataset.sequence_lengths[begin:end], self.config.sequence_length)


@dataclass(frozen=True, eq=False)
class RemoteData:
    """One process's part of the remote loader before the first step.

    Attributes:
        text: the files and the tokenizer.
        servers: servers of the loader on process 0; None on other processes.
        indices: line index of each file on process 0; empty on other processes.
    """

    text: RemoteText
    servers: RemoteServers | None
    indices: tuple[LineIndex, ...] = ()

    @property
    def lines(self) -> dict[str, LineIndex]:
        """The line index of each file, keyed by path."""
        return dict(zip(self.text.paths, self.indices, strict=False))


def check_line_file(path: str, key: str, cache: Path | None) -> None:
    """Raise ValueError unless ``path`` is a file with documents that can be read.

    Args:
        path: file of JSON or Parquet, also packed.
        key: key of the text.
        cache: ``--data-cache-path``, for the lines of packed files and of other kinds than lines.
    """
    if not Path(path).is_file():
        has_index = Path(path + ".idx").is_file()
        remedy = "--hdp-loader ray reads text; use --hdp-loader local for this data set of Megatron's"
        raise ValueError(f"{path}: {remedy if has_index else 'no such file: change the data path'}")
    if not is_plain(Path(path), key) and cache is None:
        raise ValueError(
            f"{path}: --hdp-loader ray unpacks it: give --data-cache-path, a folder that all machines of the run share"
        )


def line_files(paths: Sequence[str], key: str, cache: str | None) -> tuple[str, ...]:
    """Unpack files into ``cache`` and return the file of plain lines for each path. Prints a count of omitted records.

    Raises:
        ValueError: a file cannot be read or unpacked.
    """
    files = []
    for path in paths:
        if is_plain(Path(path), key):
            files.append(path)
            continue
        assert cache is not None, "check_line_file refuses it"
        file, left_out = unpacked(cache, Path(path), key)
        if left_out:
            print(f"note: {path}: {left_out:,} records of more than {MOST_BYTES >> 20} MiB are left out", flush=True)
        files.append(str(file))
    return tuple(files)


def open_remote(data_arguments: DataArguments, run: RunConfig, tokenizer_config: TokenizerConfig) -> RemoteData:
    """Start servers and index the files on process 0; only check options on the others. Does not communicate.

    Raises:
        ValueError: Ray does not start, or a file, a line, the tokenizer or a split is bad.
    """
    config = run.get(RemoteConfig)
    check_remote(config)
    num_processes = run.cluster.num_ranks * run.process.tensor_parallel * len(run.stage_layers)
    if config.address is None and int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)) < num_processes:
        raise ValueError(
            "--hdp-loader ray on several machines needs --hdp-ray-address: run `ray start --head` on one of them and "
            "`ray start --address HOST:PORT` on the others"
        )
    dataset = DocumentConfig(**data_arguments.settings())
    blends = [dataset.blend] if dataset.blend is not None else dataset.blend_per_split
    paths = tuple(dict.fromkeys(path for blend in blends if blend is not None for path in blend[0]))
    tokenizer = {field.name: getattr(tokenizer_config, field.name) for field in fields(tokenizer_config)}
    build = _encode_builder(tokenizer)
    cache = None if data_arguments.data_cache_path is None else str(data_arguments.data_cache_path)
    text = RemoteText(paths, data_arguments.seq_length, _tokenizer_in_words(tokenizer), build, cache)
    if run.process.rank != 0:
        return RemoteData(text, None)
    text = replace(text, files=line_files(paths, config.json_key, cache))
    build()  # a bad tokenizer raises its error here, not in an actor
    servers = RemoteServers(config, text)
    data = RemoteData(text, servers, servers.index_files())
    check_splits(dataset, data_arguments.wanted_samples(), lambda path: len(data.lines[path]))
    return data


def build_encode(settings: dict[str, Any]) -> Encode:
    """Return the function that encodes text with Megatron's tokenizer. Raises ValueError if it cannot be built."""
    return encoder(build_megatron_tokenizer(settings))


def _encode_builder(settings: dict[str, Any]) -> Callable[[], Encode]:
    """Return a function with which a server builds the encoder; for bytes it avoids Megatron's slow import."""
    is_bytes = settings["tokenizer_type"] == "NullTokenizer" and settings["vocab_size"] == BYTE_LEVEL_VOCAB_SIZE
    return partial(encoder, None) if is_bytes else partial(build_encode, settings)


def _tokenizer_in_words(settings: dict[str, Any]) -> str:
    """Return the settings as text, with the size and modification time of each file that they name."""
    files = [settings[name] for name in _TOKENIZER_FILES if settings.get(name) and Path(settings[name]).is_file()]
    stats = [(os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    return repr((sorted(settings.items()), stats))


def start_remote(
    data: RemoteData,
    settings: dict[str, Any],
    sizes: Sequence[int | None],
    make_plan: MakePlan,
) -> tuple[RemoteSplit | None, ...]:
    """Order the samples, start the scheduler, and return the splits; None for an unwanted split.

    Collective: all processes call it with equal arguments.

    Raises:
        ValueError: see ``open_remote``.
    """
    is_first = dist.get_rank() == 0
    counts = _from_first({path: len(index) for path, index in data.lines.items()})
    config = LineDatasetConfig(**settings, lines=data.lines).in_saved_order()
    sources = build_document_datasets(config, sizes, lambda: is_first, LineDataset, counts.__getitem__)
    actors: RemoteActors | None = None
    answer: tuple[RemoteAddress, dict[str, int]] | Exception | None = None
    if is_first:
        assert data.servers is not None
        splits = {
            split.name: _split_samples(source, data.text.paths)
            for split, source in zip(Split, sources, strict=True)
            if source is not None
        }
        try:
            actors = data.servers.start_scheduler(Samples(splits, data.indices), make_plan, dist.get_world_size())
            answer = actors.address, {name: split.num_samples for name, split in splits.items()}
        except Exception as error:  # all processes get it: they wait for an answer
            answer = error
    answer = _from_first(answer)
    if isinstance(answer, Exception):
        raise answer
    assert answer is not None, "process 0 sends an answer"
    address, num_samples = answer
    actors = actors or join_actors(address)
    names = (split.name for split in Split)
    return tuple(
        RemoteSplit(actors, name, num_samples[name], data.text.paths) if name in num_samples else None for name in names
    )


def _from_first[Value](value: Value) -> Value:
    """Return the value of process 0. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _split_samples(source: SampleSource, paths: Sequence[str]) -> SplitSamples:
    """Return the sample order of one split as arrays."""
    dataset = source.dataset
    if isinstance(dataset, DocumentDataset):
        return SplitSamples(len(dataset), (_file_samples(dataset, paths),))
    files = tuple(_file_samples(part, paths) for part in dataset.datasets)
    return SplitSamples(len(dataset), files, dataset.dataset_index, dataset.dataset_sample_index)


def _file_samples(dataset: DocumentDataset, paths: Sequence[str]) -> FileSamples:
    table = dataset.table
    assert isinstance(table, SampleTable), f"{table=}"
    documents = dataset.first_document + table.document
    return FileSamples(paths.index(str(dataset.dataset_path)), documents, table.start, dataset.order)
