"""Data sets whose samples are windows of documents, with Megatron's own blends, splits and sizes.

A table of ``bytescale data sculpt`` lists the tokens and documents of each window; the tokens are read from the data
set itself. ``--split`` divides the data between windows. There are two kinds of attention::

    window     The window is one sequence: a token attends to all earlier tokens of the window. A document's last token
               predicts the next document's first, as in Megatron's own samples. The window's last token has no label.
    document   Each document is its own sequence with its own positions. The label of its last token in the window is
               the next token of the document, if the document continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from bytescale_ext.config.sculpt import SculptConfig
from bytescale_ext.data.samples.lengths import SampleTable, sample_table
from bytescale_ext.data.samples.packed import shift_labels
from bytescale_ext.plan.sculpt.pieces import window_bounds
from megatron.bytescale.core.datasets.document_dataset import (
    DocumentConfig,
    DocumentDataset,
    SampleSource,
    build_document_datasets,
    read_document,
)


@dataclass
class WindowConfig(DocumentConfig):
    """Megatron's configuration, plus the attention and the window table of each data set, keyed by path.

    ``shuffled``: data sets whose windows have a new order of documents in each epoch.
    """

    tables: dict[str, np.ndarray] = field(default_factory=dict)
    attention: str = "window"
    shuffled: frozenset[str] = frozenset()

    def num_windows(self, prefix: str) -> int:
        """Return the number of windows of a data set."""
        return len(window_bounds(self.tables[prefix])) - 1


@dataclass(frozen=True, eq=False)
class WindowedDocuments:
    """The part of Megatron's reader that a ``DocumentDataset`` needs to order samples, with windows as documents.

    Attributes:
        reader: Megatron's reader of the documents.
        table: rows of all windows, [rows].
        document_indices: first row of each window, [windows + 1].
        sequence_lengths: number of tokens of each row, [rows].
    """

    reader: IndexedDataset
    table: np.ndarray
    document_indices: np.ndarray
    sequence_lengths: np.ndarray


class WindowDataset(DocumentDataset):
    """The windows of one split of one data set, reshuffled each epoch; each window is one sample."""

    dataset: WindowedDocuments

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: WindowConfig) -> Any:  # type: ignore[override]
        """Return the windows of a data set."""
        table = config.tables[dataset_path]
        reader = DocumentDataset.build_low_level_dataset(dataset_path, config)
        return WindowedDocuments(reader, table, window_bounds(table), table["length"])

    def samples_of(self, begin: int, end: int) -> SampleTable:
        """Return the samples of the windows [begin, end)."""
        lengths = window_lengths(self.dataset.document_indices[begin : end + 1], self.dataset.sequence_lengths)
        return sample_table(lengths, self.config.sequence_length)

    def rows(self, i: int) -> np.ndarray:
        """Return the rows [n] of the window of sample ``i``."""
        window = self.sample(i).document
        first, end = self.dataset.document_indices[window : window + 2]
        rows = self.dataset.table[first:end]
        if str(self.dataset_path) not in self.config.shuffled:
            return rows
        return rows[row_order(self.config.random_seed, i // len(self.table), window, len(rows))]

    def read_row(self, row: np.void, start: int, stop: int) -> np.ndarray:
        """Return tokens ``start`` to ``stop`` of a row, int64 [stop - start].

        ``stop`` may be one past the row's end, to include the document's next token. The result is one token shorter if
        the row ends its document.
        """
        first = int(row["start"])
        return read_document(self.dataset.reader, int(row["document"]), first + start, first + stop)

    def read(self, i: int, start: int, stop: int) -> np.ndarray:
        """Read only tokens ``start`` to ``stop`` of a window, int64 [stop - start]; fewer if the window is shorter."""
        parts, begin = [np.zeros(0, dtype=np.int64)], 0
        for row in self.rows(i):
            end = begin + int(row["length"])
            if start < end and begin < stop:
                parts.append(self.read_row(row, max(start, begin) - begin, min(stop, end) - begin))
            begin = end
        return np.concatenate(parts)

    def describe(self, i: int) -> str:
        """Return ``"<prefix>: window 3"``."""
        sample = self.sample(i)
        return f"{sample.prefix}: window {sample.document}"

    def describe_row(self, i: int, place: int) -> str:
        """Return ``"<prefix>: window 3, document 12 tokens 0-4096"``."""
        row = self.rows(i)[place]
        first, length = int(row["start"]), int(row["length"])
        return f"{self.describe(i)}, document {int(row['document'])} tokens {first}-{first + length}"


class WindowSamples(WindowDataset):
    """Windows in the format of Megatron's own training: tensors of ``--seq-length`` tokens, padded at the end."""

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Return the sample under the keys of Megatron's GPT samples: tensors [s], and a mask [1, s, s].

        The mask is True where attention is forbidden. Only attention inside documents needs it.
        """
        size = self.config.sequence_length
        tokens, labels = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        loss_mask, positions = np.zeros(size, dtype=np.float32), np.arange(size)
        sequence, at = np.full(size, -1), 0
        for number, (read, length) in enumerate(self._sequences(idx)):
            part = slice(at, at + length)
            tokens[part], labels[part], loss_mask[part] = shift_labels(read, length)
            positions[part], sequence[part] = np.arange(length), number
            at += length
        sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
        if self.config.attention == "document":
            allowed = np.tril(np.equal.outer(sequence, sequence))
            sample["attention_mask"] = ~allowed[None]
        return {name: torch.from_numpy(values) for name, values in sample.items()}

    def _sequences(self, i: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yield (tokens with the next token [n + 1 or n], n) of each sequence in the window of sample ``i``."""
        if self.config.attention == "window":
            length = self.length(i)
            yield self.read(i, 0, length), length
            return
        for row in self.rows(i):
            length = int(row["length"])
            yield self.read_row(row, 0, length + 1), length


class DocumentsOfWindows(SampleSource):
    """A ``TokenSource`` of windows whose sequences are the window rows, which are parts of documents.

    Row k of sample i has the number ``i * most + k``; no window has more than ``most`` rows.
    """

    def __init__(self, dataset: WindowDataset | BlendedDataset) -> None:
        super().__init__(dataset)
        datasets = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
        self._most = max(int(np.diff(part.dataset.document_indices).max()) for part in datasets)

    def sequences(self, samples: Sequence[int]) -> Sequence[int]:
        """Return the row numbers of the windows of these samples."""
        numbers: list[int] = []
        for first in (i * self._most for i in samples):
            dataset, window, _ = self._place(first)
            numbers += range(first, first + len(dataset.rows(window)))
        return tuple(numbers)

    def lengths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the token counts [n] of rows ``indices`` [n]."""
        return np.array([self.length(int(i)) for i in indices], dtype=np.int64)

    def length(self, i: int) -> int:
        """Return the number of tokens of row ``i``, without reading them."""
        dataset, window, place = self._place(i)
        return int(dataset.rows(window)[place]["length"])

    def read(self, i: int, start: int, stop: int) -> np.ndarray:
        """Return tokens [stop - start] of row ``i``; see ``WindowDataset.read_row``."""
        dataset, window, place = self._place(i)
        return dataset.read_row(dataset.rows(window)[place], start, stop)

    def describe(self, i: int) -> str:
        """Return the location of row ``i`` as text."""
        dataset, window, place = self._place(i)
        return dataset.describe_row(window, place)

    def _place(self, i: int) -> tuple[WindowDataset, int, int]:
        """Return the data set of row ``i``, the index of its window there, and its position in the window."""
        sample, place = divmod(i, self._most)
        dataset, window = self._locate(sample)
        assert isinstance(dataset, WindowDataset), f"{dataset=}"
        return dataset, window, place


@lru_cache(maxsize=4096)
def row_order(seed: int, epoch: int, window: int, num_rows: int) -> np.ndarray:
    """Return the order of a window's rows in an epoch, int64 [num_rows]. Each row of a step asks for it."""
    key = [seed % 2**32, epoch, window % 2**32]
    return np.random.RandomState(key).permutation(num_rows)


def window_lengths(bounds: np.ndarray, row_lengths: np.ndarray) -> np.ndarray:
    """Return the tokens of consecutive windows, int64 [n].

    Args:
        bounds: first row of each window, and the row after the last window: [n + 1].
        row_lengths: tokens of each row of the table, [rows].
    """
    offsets = np.zeros(int(bounds[-1] - bounds[0]) + 1, dtype=np.int64)
    np.cumsum(row_lengths[bounds[0] : bounds[-1]], dtype=np.int64, out=offsets[1:])
    lengths: np.ndarray = np.diff(offsets[bounds - bounds[0]])
    return lengths


def window_config(config: SculptConfig, settings: dict[str, Any]) -> WindowConfig:
    """Return the configuration of window data sets. ``settings``: fields of Megatron's own configuration."""
    return WindowConfig(**settings, tables=config.tables(), attention=config.attention, shuffled=config.shuffled())


def build_windows(config: WindowConfig, sizes: Sequence[int | None]) -> tuple[SampleSource | None, ...]:
    """Return the train, validation and test samples; see ``build_document_datasets``. Collective."""
    built = build_document_datasets(config, sizes, lambda: True, WindowDataset, config.num_windows)
    if config.attention == "window":
        return built
    return tuple(None if source is None else DocumentsOfWindows(source.dataset) for source in built)
