"""Groups of documents as samples: documents that follow one another in a data set, and share each step.

A sample is a group, such as a pair of answers or all answers to one prompt, so batch sizes, blends, splits and
checkpoints count groups. A plan places the documents of a group as sequences of their own. Documents lose their end
beyond ``--seq-length``; a group with a document that has no answer before that limit gives no sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from bytescale_ext.data.corpus.sidecar import group_bounds
from bytescale_ext.data.samples.lengths import SampleTable, read_idx_lengths, sample_table
from megatron.bytescale.core.datasets.answer_dataset import AnswerConfig, answer_config, numbers_of_tokens
from megatron.bytescale.core.datasets.document_dataset import (
    DocumentDataset,
    SampleSource,
    build_document_datasets,
    check_splits,
    document_bounds,
    read_document,
    wanted_parts,
)


@dataclass
class GroupConfig(AnswerConfig):
    """Configuration of conversations, plus the first document of each group of each data set, keyed by path.

    Attributes:
        groups: see ``group_bounds``: [groups + 1].
    """

    groups: dict[str, np.ndarray] = field(default_factory=dict)

    def kept_lengths(self, prefix: str, bounds: np.ndarray) -> np.ndarray:
        """Return the tokens of each document of these groups up to the limit, 0 in groups without a sample: int64 [n].

        ``bounds``: first document of each group, and the end of the last: [groups + 1].
        """
        lengths, part = read_idx_lengths(prefix), slice(bounds[0], bounds[-1])
        kept = np.minimum(lengths[part], self.sequence_length)
        has_answer = self.have_answers(prefix, (np.cumsum(lengths) - lengths)[part], kept)
        whole = np.logical_and.reduceat(has_answer, bounds[:-1] - bounds[0])
        return np.where(np.repeat(whole, np.diff(bounds)), kept, 0)

    def group_table(self, kept: np.ndarray, bounds: np.ndarray) -> SampleTable:
        """Return one sample for each group with tokens.

        Args:
            kept: tokens of documents that follow one another: [n].
            bounds: index in ``kept`` of the first document of each group, and the end of the last: [groups + 1].
        """
        ends = np.concatenate(([0], np.cumsum(kept)))
        lengths = ends[bounds[1:]] - ends[bounds[:-1]]
        return sample_table(lengths, max(1, int(lengths.max(initial=0))))

    def split_table(self, prefix: str, share: tuple[float, float]) -> SampleTable:
        """Return the samples of a share of the groups of a data set."""
        begin, end = document_bounds(share, self.num_groups(prefix))
        bounds = self.groups[prefix][begin : end + 1]
        return self.group_table(self.kept_lengths(prefix, bounds), bounds - bounds[0])

    def num_groups(self, prefix: str) -> int:
        """Return the number of groups of a data set."""
        return len(self.groups[prefix]) - 1


@dataclass(frozen=True, eq=False)
class GroupedDocuments:
    """The part of Megatron's reader that a ``DocumentDataset`` needs to order samples, with groups as documents.

    Attributes:
        reader: Megatron's reader of the documents.
        first_tokens: first token of each document in the file: [n].
        document_indices: first document of each group, and their number: [groups + 1].
        sequence_lengths: tokens of each document up to the limit, 0 in groups without a sample: [n].
    """

    reader: IndexedDataset
    first_tokens: np.ndarray
    document_indices: np.ndarray
    sequence_lengths: np.ndarray


class GroupDataset(DocumentDataset):
    """The groups of one split of one data set, reshuffled each epoch; each group is one sample."""

    dataset: GroupedDocuments
    config: GroupConfig

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GroupConfig) -> Any:  # type: ignore[override]
        """Return the groups of a data set."""
        reader = DocumentDataset.build_low_level_dataset(dataset_path, config)
        lengths = read_idx_lengths(dataset_path)
        bounds = config.groups[dataset_path]
        kept = config.kept_lengths(dataset_path, bounds)
        return GroupedDocuments(reader, np.cumsum(lengths) - lengths, bounds, kept)

    def samples_of(self, begin: int, end: int) -> SampleTable:
        """Return the samples of the groups [begin, end) of the file."""
        documents = self.dataset
        return self.config.group_table(documents.sequence_lengths, documents.document_indices[begin : end + 1])

    def documents_of(self, i: int) -> tuple[int, int]:
        """Return the first document of group ``i`` in the file, and the end of the group."""
        first, end = self.dataset.document_indices[self.sample(i).document :][:2]
        return int(first), int(end)

    def kept(self, document: int) -> int:
        """Return the number of tokens of a document up to the limit."""
        return int(self.dataset.sequence_lengths[document])

    def numbers(self, numbers: np.ndarray, document: int, start: int, stop: int) -> np.ndarray:
        """Return the numbers of a sidecar for tokens [start, stop) of a document, float32 [stop - start].

        Positions past the end have 0. ``numbers``: of all tokens of the data set, [num_tokens].
        """
        first = int(self.dataset.first_tokens[document])
        return numbers_of_tokens(numbers[first : first + self.kept(document)], start, stop)


class Groups(SampleSource):
    """A ``TokenSource`` whose sequences are the documents of groups; document k of group i has the number S i + k.

    S is the number of documents of the largest group.
    """

    def __init__(self, dataset: DocumentDataset | BlendedDataset) -> None:
        super().__init__(dataset)
        parts = [dataset] if isinstance(dataset, DocumentDataset) else dataset.datasets
        self._stride = max(int(np.diff(part.dataset.document_indices).max()) for part in parts)

    def sequences(self, samples: Sequence[int]) -> Sequence[int]:
        """Return the documents of these groups."""
        return tuple(number for sample in samples for number in self._members(sample))

    def members(self, i: int) -> tuple[int, ...]:
        """Return the documents of the group of document ``i``."""
        return tuple(self._members(i // self._stride))

    def shared_tokens(self, i: int) -> int:
        """Return the number of first tokens that the documents of a group share and that predict no label with a loss.

        ``i``: a document of the group.
        """
        first, *others = self.members(i)
        shared = min(self._tokens_before_loss(number) for number in (first, *others))
        tokens = self.read(first, 0, shared)
        for number in others:
            differs = self.read(number, 0, len(tokens)) != tokens
            tokens = tokens[: int(differs.argmax())] if differs.any() else tokens
        return len(tokens)

    def _tokens_before_loss(self, i: int) -> int:
        """Return the tokens of a document before the first that predicts a label with a loss, but not the last."""
        has_loss = self.weights(i, 1, self.length(i)) != 0
        return int(has_loss.argmax()) if has_loss.any() else max(0, self.length(i) - 1)

    def sample_lengths(self, samples: Sequence[int]) -> np.ndarray:
        """Return the numbers of tokens of groups: [samples]."""
        return super().lengths(np.asarray(samples))

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
        return f"{dataset.dataset_path}: document {document} tokens 0-{dataset.kept(document)}"

    def weights(self, i: int, start: int, stop: int) -> np.ndarray:
        """Return the weights of tokens of document ``i``, float32 [stop - start]."""
        dataset, document = self._place(i)
        return dataset.numbers(dataset.config.weights[str(dataset.dataset_path)], document, start, stop)

    def numbers(self, sidecar: dict[str, np.ndarray], i: int, start: int, stop: int) -> np.ndarray:
        """Return numbers of tokens of document ``i``, float32 [stop - start].

        ``sidecar``: numbers of all tokens, [num_tokens], by prefix of the data set.
        """
        dataset, document = self._place(i)
        return dataset.numbers(sidecar[str(dataset.dataset_path)], document, start, stop)

    def _members(self, sample: int) -> range:
        dataset, inner = self._locate(sample)
        assert isinstance(dataset, GroupDataset), f"{dataset=}"
        first, end = dataset.documents_of(inner)
        return range(self._stride * sample, self._stride * sample + end - first)

    def _place(self, i: int) -> tuple[GroupDataset, int]:
        """Return the data set of document ``i``, and its index there."""
        dataset, sample = self._locate(i // self._stride)
        assert isinstance(dataset, GroupDataset), f"{dataset=}"
        first, end = dataset.documents_of(sample)
        assert i % self._stride < end - first, f"{i=} {first=} {end=}"
        return dataset, first + i % self._stride


class Pairs(Groups):
    """Groups of a preferred answer and another (``PairSource``).

    Args:
        dataset: pairs.
        references: log-probabilities of all tokens under the reference model, [num_tokens], by prefix of the data set;
            empty without a reference.
    """

    def __init__(self, dataset: DocumentDataset | BlendedDataset, references: dict[str, np.ndarray]) -> None:
        super().__init__(dataset)
        self._references = references

    def reference_sums(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the sum of weight times reference log-probability over the labels of documents: float64 [documents].

        It is 0 without a reference.
        """
        sums = np.zeros(len(numbers))
        for place, number in enumerate(numbers if self._references else ()):
            stop = self.length(number)
            weights, logprobs = self.weights(number, 1, stop), self.numbers(self._references, number, 1, stop)
            sums[place] = (weights.astype(np.float64) * logprobs.astype(np.float64)).sum()
        return sums


class Rollouts(Groups):
    """Groups of recorded rollouts (``RolloutSource``).

    Args:
        dataset: groups.
        numbers: old log-probabilities, advantages, and log-probabilities under the reference model of all tokens,
            [num_tokens], each by prefix of the data set; without entries, they are 0.
    """

    def __init__(self, dataset: DocumentDataset | BlendedDataset, numbers: Sequence[dict[str, np.ndarray]]) -> None:
        super().__init__(dataset)
        self._rollouts = numbers

    def rollout_numbers(self, i: int, start: int, stop: int) -> np.ndarray:
        """Return the three numbers of tokens of document ``i``, float32 [stop - start, 3]; 0 past its end."""
        empty = np.zeros(stop - start, dtype=np.float32)
        return np.stack([self.numbers(part, i, start, stop) if part else empty for part in self._rollouts], axis=1)


def group_config(prefixes: Sequence[str], settings: dict[str, Any]) -> GroupConfig:
    """Return the configuration of data sets of groups. ``settings``: fields of Megatron's own configuration.

    Raises:
        ValueError: a data set has no groups.
    """
    weights = answer_config(prefixes, settings).weights
    groups = {prefix: group_bounds(prefix, whole=False) for prefix in prefixes}
    return GroupConfig(**settings, weights=weights, groups=groups)


def build_groups(
    config: GroupConfig, sizes: Sequence[int | None]
) -> tuple[DocumentDataset | BlendedDataset | None, ...]:
    """Return the train, validation and test groups; see ``build_document_datasets``. Collective."""
    built = build_document_datasets(config, sizes, lambda: True, GroupDataset, config.num_groups)
    return tuple(None if source is None else source.dataset for source in built)


def check_groups(config: GroupConfig, sizes: Sequence[int | None], most_tokens: int | None = None) -> list[str]:
    """Refuse splits without groups; return a log line for each split that drops groups.

    Args:
        config, sizes: see ``build_groups``.
        most_tokens: limit of the tokens of a step; None without a limit.

    Raises:
        ValueError: a split has no group whose documents all have an answer, or a group is larger than a step.
    """
    lines = []
    for split, prefixes, share in wanted_parts(check_splits(config, sizes, config.num_groups)):
        tables = [config.split_table(prefix, share) for prefix in prefixes]
        num_kept, num_empty = sum(map(len, tables)), sum(table.num_empty for table in tables)
        if not num_kept:
            raise ValueError(
                f"{', '.join(prefixes)}: no group of the {split.name} split has an answer in the first --seq-length "
                f"{config.sequence_length} tokens of each document: raise it, or give another --split or --eval-iters 0"
            )
        longest = max(int(table.length.max(initial=0)) for table in tables)
        if most_tokens is not None and longest > most_tokens:
            raise ValueError(
                f"{', '.join(prefixes)}: a group has {longest} tokens, more than the {most_tokens} of a step: raise "
                "--hdp-global-tokens, or lower --seq-length"
            )
        if num_empty:
            lines.append(
                f"> bytescale: {split.name}: {num_kept:,} of {num_kept + num_empty:,} groups have an answer in the "
                f"first {config.sequence_length:,} tokens of each document"
            )
    return lines
