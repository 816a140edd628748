"""Pairs of answers as samples: two documents that follow one another in a data set, and share each step.

A sample is a pair, so batch sizes, blends, splits and checkpoints count pairs. A plan places both documents as
sequences of their own. Both lose their end beyond ``--seq-length``; a pair without an answer in one of them before that
limit gives no sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from bytescale_ext.data.samples.lengths import SampleTable, read_idx_lengths, sample_table
from megatron.bytescale.core.datasets.answer_dataset import AnswerConfig, numbers_of_tokens
from megatron.bytescale.core.datasets.document_dataset import (
    DocumentDataset,
    SampleSource,
    build_document_datasets,
    check_splits,
    read_document,
)


@dataclass(frozen=True, eq=False)
class PairedDocuments:
    """The part of Megatron's reader that a ``DocumentDataset`` needs to order samples, with pairs as documents.

    Attributes:
        reader: Megatron's reader of the documents.
        first_tokens: first token of each document in the file: [n].
        document_indices: first document of each pair: [n / 2 + 1].
        sequence_lengths: tokens of each document up to the limit, 0 in pairs without an answer: [n].
    """

    reader: IndexedDataset
    first_tokens: np.ndarray
    document_indices: np.ndarray
    sequence_lengths: np.ndarray


class PairDataset(DocumentDataset):
    """The pairs of one split of one data set, reshuffled each epoch; each pair is one sample."""

    dataset: PairedDocuments
    config: AnswerConfig

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: AnswerConfig) -> Any:  # type: ignore[override]
        """Return the pairs of a data set."""
        reader = DocumentDataset.build_low_level_dataset(dataset_path, config)
        lengths = read_idx_lengths(dataset_path)
        first_tokens, kept = np.cumsum(lengths) - lengths, np.minimum(lengths, config.sequence_length)
        has_answer = config.have_answers(dataset_path, first_tokens, kept)
        whole = np.repeat(has_answer.reshape(-1, 2).all(axis=1), 2)
        return PairedDocuments(reader, first_tokens, np.arange(0, len(lengths) + 1, 2), np.where(whole, kept, 0))

    def samples_of(self, begin: int, end: int) -> SampleTable:
        """Return the samples of the pairs [begin, end) of the file."""
        lengths = self.dataset.sequence_lengths.reshape(-1, 2).sum(axis=1)
        return sample_table(lengths[begin:end], 2 * self.config.sequence_length)

    def document_of(self, i: int, member: int) -> int:
        """Return the document of a member of pair ``i``: 0 for the preferred answer, 1 for the other."""
        return 2 * self.sample(i).document + member

    def kept(self, document: int) -> int:
        """Return the number of tokens of a document up to the limit."""
        return int(self.dataset.sequence_lengths[document])

    def numbers(self, numbers: np.ndarray, document: int, start: int, stop: int) -> np.ndarray:
        """Return the numbers of a sidecar for tokens [start, stop) of a document, float32 [stop - start].

        Positions past the end have 0. ``numbers``: of all tokens of the data set, [num_tokens].
        """
        first = int(self.dataset.first_tokens[document])
        return numbers_of_tokens(numbers[first : first + self.kept(document)], start, stop)


class Pairs(SampleSource):
    """A ``TokenSource`` whose sequences are the documents of pairs; document k of pair i has the number 2 i + k.

    Args:
        dataset: pairs.
        references: log-probabilities of all tokens under the reference model, [num_tokens], by prefix of the data set;
            empty without a reference.
    """

    def __init__(self, dataset: DocumentDataset | BlendedDataset, references: dict[str, np.ndarray]) -> None:
        super().__init__(dataset)
        self._references = references

    def sequences(self, samples: tuple[int, ...]) -> tuple[int, ...]:
        """Return the documents of these pairs."""
        return tuple(number for sample in samples for number in (2 * sample, 2 * sample + 1))

    def length(self, i: int) -> int:
        """Return the number of tokens of document ``i``, without reading them."""
        dataset, document = self._place(i)
        return dataset.kept(document)

    def lengths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the numbers of tokens of documents ``indices`` [n]: [n]."""
        return np.array([self.length(int(i)) for i in indices], dtype=np.int64)

    def read(self, i: int, start: int, stop: int) -> np.ndarray:
        """Return tokens of document ``i``, int64 [stop - start], one fewer past its end."""
        dataset, document = self._place(i)
        return read_document(dataset.dataset.reader, document, start, stop)

    def describe(self, i: int) -> str:
        """Return the location of document ``i`` as text."""
        dataset, document = self._place(i)
        return f"{dataset.dataset_path}: document {document}"

    def weights(self, i: int, start: int, stop: int) -> np.ndarray:
        """Return the weights of tokens of document ``i``, float32 [stop - start]."""
        dataset, document = self._place(i)
        return dataset.numbers(dataset.config.weights[str(dataset.dataset_path)], document, start, stop)

    def reference_sums(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the sum of weight times reference log-probability over the labels of documents: float64 [documents].

        It is 0 without a reference.
        """
        sums = np.zeros(len(numbers))
        for place, number in enumerate(numbers if self._references else ()):
            dataset, document = self._place(number)
            stop, prefix = dataset.kept(document), str(dataset.dataset_path)
            parts = (dataset.config.weights[prefix], self._references[prefix])
            weights, logprobs = (dataset.numbers(part, document, 1, stop).astype(np.float64) for part in parts)
            sums[place] = (weights * logprobs).sum()
        return sums

    def _place(self, i: int) -> tuple[PairDataset, int]:
        """Return the data set of document ``i``, and its index there."""
        dataset, sample = self._locate(i // 2)
        assert isinstance(dataset, PairDataset), f"{dataset=}"
        return dataset, dataset.document_of(sample, i % 2)


def num_pairs(prefix: str) -> int:
    """Return the number of pairs of a data set. Raises ValueError for a document without its partner."""
    count = len(read_idx_lengths(prefix))
    if count % 2:
        raise ValueError(f"{prefix}: {count} documents, so one has no partner: use bytescale corpus --pairs")
    return count // 2


def build_pairs(
    config: AnswerConfig, references: dict[str, np.ndarray], sizes: Sequence[int | None]
) -> tuple[SampleSource | None, ...]:
    """Return the train, validation and test samples; see ``build_document_datasets``. Collective.

    ``references``: log-probabilities of all tokens, [num_tokens], by prefix of the data set.
    """
    built = build_document_datasets(config, sizes, lambda: True, PairDataset, num_pairs)
    return tuple(None if source is None else Pairs(source.dataset, references) for source in built)


def check_pairs(config: AnswerConfig, sizes: Sequence[int | None]) -> None:
    """Refuse splits without pairs. Raises ValueError."""
    check_splits(config, sizes, num_pairs)
