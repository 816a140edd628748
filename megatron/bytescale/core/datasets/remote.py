"""Remote loading meets Megatron: its tokenizer in the servers, its blends and splits for the order of samples."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.utils import Split
from megatron.training.config import TokenizerConfig

from bytescale_ext.config import RemoteConfig
from bytescale_ext.data.remote import RemoteActors, RemoteServers, RemoteText, check_remote, join_actors
from bytescale_ext.data.remote_lines import LineIndex
from bytescale_ext.data.remote_loader import RemoteSplit
from bytescale_ext.data.remote_scheduler import FileSamples, SplitSamples
from bytescale_ext.data.texts import BYTE_LEVEL_VOCAB_SIZE, Encode, encoder
from bytescale_ext.plan.shapes import StepPlan
from megatron.bytescale.core.datasets.corpus import build_megatron_tokenizer
from megatron.bytescale.core.datasets.document_dataset import (
    DocumentDataset,
    SampleSource,
    build_document_datasets,
    check_splits,
)

_TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")


@dataclass(frozen=True, eq=False)
class LineDocuments:
    """What a ``DocumentDataset`` asks of a file to order its samples: all documents, each one sequence long."""

    sequence_lengths: np.ndarray
    document_indices: np.ndarray


@dataclass
class LineDatasetConfig(BlendedMegatronDatasetConfig):
    """Megatron's configuration, with the index of each file by path."""

    lines: dict[str, LineIndex] = field(default_factory=dict)


class LineDataset(DocumentDataset):
    """The order of the samples of a JSONL file; it reads nothing. Its lengths are ``LineIndex.table_lengths``."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: LineDatasetConfig) -> Any:  # type: ignore[override]
        """The documents of one file."""
        lengths = config.lines[dataset_path].table_lengths
        return LineDocuments(lengths, np.arange(len(lengths) + 1))


@dataclass(frozen=True, eq=False)
class RemoteData:
    """What one process holds of the remote loader between its start and its first step.

    Attributes:
        text: the files and the tokenizer.
        servers: on process 0, else None.
        indices: of each file, on process 0, else empty.
    """

    text: RemoteText
    servers: RemoteServers | None
    indices: tuple[LineIndex, ...] = ()

    @property
    def lines(self) -> dict[str, LineIndex]:
        """The index of each file by path."""
        return dict(zip(self.text.paths, self.indices, strict=False))


def check_line_file(path: str) -> None:
    """Refuse what is no JSONL file. Raises ValueError."""
    if not path.endswith(".jsonl"):
        raise ValueError(
            f"{path}: --hdp-loader ray reads .jsonl files; use --hdp-loader local for Megatron's data sets"
        )
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file: change the data path")


def open_remote(args: Any, config: RemoteConfig, settings: dict[str, Any], sizes: Sequence[int | None]) -> RemoteData:
    """Start servers and index the files on process 0; elsewhere only see that it can work. Nothing is communicated.

    Args:
        args: Megatron's.
        config: the settings of the remote loader.
        settings: fields of Megatron's configuration of data sets.
        sizes: samples of each split.

    Raises:
        ValueError: Ray, a file, a line, the tokenizer or a split is bad.
    """
    check_remote(config)
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    if config.address is None and local_processes < args.world_size:
        raise ValueError(
            "--hdp-loader ray on several machines needs --hdp-ray-address: run `ray start --head` on one of them and "
            "`ray start --address HOST:PORT` on the others"
        )
    dataset = BlendedMegatronDatasetConfig(**settings)
    blends = [dataset.blend] if dataset.blend is not None else dataset.blend_per_split
    paths = tuple(dict.fromkeys(path for blend in blends if blend is not None for path in blend[0]))
    tokenizer = {one.name: getattr(args, one.name, one.default) for one in dataclasses.fields(TokenizerConfig)}
    build = _encode_builder(tokenizer)
    text = RemoteText(paths, args.seq_length, _tokenizer_in_words(tokenizer), build, args.data_cache_path)
    if args.rank != 0:
        return RemoteData(text, None)
    build()  # its errors are the user's: here, not in an actor
    servers = RemoteServers(config, text)
    data = RemoteData(text, servers, servers.index_files())
    check_splits(dataset, sizes, lambda path: len(data.lines[path]))
    return data


def build_encode(settings: dict[str, Any]) -> Encode:
    """The function from text to tokens of Megatron's tokenizer. Raises ValueError where it cannot be built."""
    return encoder(build_megatron_tokenizer(settings))


def _encode_builder(settings: dict[str, Any]) -> Callable[[], Encode]:
    """Makes the function from text to tokens in a server; with the flags that ``bytescale corpus`` prints for bytes
    it needs no Megatron there, which takes long to import."""
    is_bytes = settings["tokenizer_type"] == "NullTokenizer" and settings["vocab_size"] == BYTE_LEVEL_VOCAB_SIZE
    return partial(encoder, None) if is_bytes else partial(build_encode, settings)


def _tokenizer_in_words(settings: dict[str, Any]) -> str:
    """The settings, and of each file that they name its size and time."""
    files = [settings[name] for name in _TOKENIZER_FILES if settings.get(name) and Path(settings[name]).is_file()]
    stats = [(os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    return repr((sorted(settings.items()), stats))


def start_remote(
    data: RemoteData,
    settings: dict[str, Any],
    sizes: Sequence[int | None],
    make_plan: Callable[[tuple[int, ...]], tuple[StepPlan, bool]],
) -> tuple[RemoteSplit | None, ...]:
    """Train, validation and test samples, None for a split that is not wanted: orders them, starts the scheduler.

    Collective: every process calls it with equal arguments.

    Raises:
        ValueError: as ``open_remote``.
    """
    is_first = dist.get_rank() == 0
    counts = _from_first({path: len(index) for path, index in data.lines.items()})
    config = LineDatasetConfig(**settings, lines=data.lines)
    sources = build_document_datasets(config, sizes, lambda: is_first, LineDataset, counts.__getitem__)
    actors: RemoteActors | None = None
    said: Any = None
    if is_first:
        assert data.servers is not None
        splits = {
            split.name: _split_samples(source, data.text.paths)
            for split, source in zip(Split, sources, strict=True)
            if source is not None
        }
        try:
            actors = data.servers.start_scheduler(splits, data.indices, make_plan, dist.get_world_size())
            said = actors.address, {name: split.num_samples for name, split in splits.items()}
        except Exception as error:  # said to all, so that none waits for what does not come
            said = error
    said = _from_first(said)
    if isinstance(said, Exception):
        raise said
    address, num_samples = said
    actors = actors or join_actors(address)
    names = (split.name for split in Split)
    return tuple(
        RemoteSplit(actors, name, num_samples[name], data.text.paths) if name in num_samples else None for name in names
    )


def _from_first(value: Any) -> Any:
    """What process 0 has. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _split_samples(source: SampleSource, paths: Sequence[str]) -> SplitSamples:
    """The order of one split as arrays."""
    dataset = source.dataset
    if isinstance(dataset, DocumentDataset):
        return SplitSamples(len(dataset), (_file_samples(dataset, paths),))
    files = tuple(_file_samples(one, paths) for one in dataset.datasets)
    return SplitSamples(len(dataset), files, dataset.dataset_index, dataset.dataset_sample_index)


def _file_samples(dataset: DocumentDataset, paths: Sequence[str]) -> FileSamples:
    documents = dataset.indices[dataset.table.document]
    return FileSamples(paths.index(str(dataset.dataset_path)), documents, dataset.table.start, dataset.order)
