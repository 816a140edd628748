"""Conversations as samples: each sample is a whole document, and only its answers are trained on.

Megatron's blends and splits apply. A conversation longer than ``--seq-length`` loses its end, as in Megatron's own
``SFTDataset``: without its beginning the rest could not be trained on. A conversation with no answer before that limit
gives no sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bytescale_ext.data.corpus.sidecar import open_sidecar, weights_of
from bytescale_ext.data.samples.idx_file import open_index
from bytescale_ext.data.samples.lengths import SampleTable, read_idx_lengths, sample_table
from megatron.bytescale.core.datasets.document_dataset import (
    DocumentConfig,
    DocumentDataset,
    SampleSource,
    build_document_datasets,
    document_bounds,
    wanted_parts,
)


@dataclass
class AnswerConfig(DocumentConfig):
    """Megatron's configuration, plus the weights of each data set, keyed by path."""

    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def table(self, prefix: str, first_tokens: np.ndarray, lengths: np.ndarray) -> SampleTable:
        """Return the samples of documents that begin at tokens ``first_tokens`` [n] of a file; ``lengths``: [n].

        A document's first token is never a label, so it does not count as an answer.
        """
        kept = np.minimum(lengths, self.sequence_length)
        has_answer = self.have_answers(prefix, first_tokens, kept)
        return sample_table(np.where(has_answer, kept, 0), self.sequence_length)

    def split_table(self, prefix: str, share: tuple[float, float]) -> SampleTable:
        """Return the samples of a share of a data set."""
        lengths = read_idx_lengths(prefix)
        part = slice(*document_bounds(share, len(lengths)))
        return self.table(prefix, (np.cumsum(lengths) - lengths)[part], lengths[part])

    def have_answers(self, prefix: str, first_tokens: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Return whether documents have an answer in their first ``kept`` tokens, bool [n]; arrays: [n]."""
        weights = self.weights[prefix]
        ends = zip((first_tokens + 1).tolist(), (first_tokens + kept).tolist(), strict=True)
        return np.array([np.count_nonzero(weights[start:end]) > 0 for start, end in ends], dtype=bool)


class AnswerDataset(DocumentDataset):
    """The conversations of one split of one data set, reshuffled each epoch; each conversation is one sample."""

    config: AnswerConfig

    def samples_of(self, begin: int, end: int) -> SampleTable:
        """Return the first ``--seq-length`` tokens of each document with an answer among them."""
        bounds = open_index(str(self.dataset_path)).first_tokens(np.arange(begin, end + 1))
        self._first_tokens = bounds[:-1]
        return self.config.table(str(self.dataset_path), bounds[:-1], np.diff(bounds))

    def weights(self, i: int, start: int, stop: int) -> np.ndarray:
        """Return the weights of tokens [start, stop) of sample ``i``, float32 [stop - start]; 0 past its end."""
        row = self._row(i)
        document, _, length = self.table.place(row)
        numbers, first = self.config.weights[str(self.dataset_path)], int(self._first_tokens[document])
        return numbers_of_tokens(numbers[first : first + length], start, stop)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Return the whole sample, unpadded, under the keys of Megatron's GPT samples; each tensor is [length]."""
        sample = super().__getitem__(idx)
        length = self.length(idx)
        sample["loss_mask"] *= sample["loss_mask"].new_tensor(self.weights(idx, 1, length + 1))
        return sample


def numbers_of_tokens(numbers: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return the numbers of tokens [start, stop) of a document, float32 [stop - start]; 0 past its end.

    ``numbers``: numbers of all its tokens, from a sidecar, [tokens].
    """
    found = np.zeros(stop - start, dtype=np.float32)
    known = numbers[start:stop]
    found[: len(known)] = known
    return found


class Conversations(SampleSource):
    """A ``TokenSource`` of conversations that has weights of their tokens (``WeightSource``)."""

    def weights(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        """Return the weights of tokens of a sample, float32 [stop - start]; see ``AnswerDataset.weights``."""
        dataset, inner = self._locate(sample_id)
        assert isinstance(dataset, AnswerDataset), f"{dataset=}"
        return dataset.weights(inner, start, stop)


def answer_config(prefixes: Sequence[str], settings: dict[str, Any]) -> AnswerConfig:
    """Return the configuration of conversation data sets. ``settings``: fields of Megatron's own configuration."""
    return AnswerConfig(**settings, weights={prefix: open_sidecar(weights_of(prefix)) for prefix in prefixes})


def build_conversations(config: AnswerConfig, sizes: Sequence[int | None]) -> tuple[SampleSource | None, ...]:
    """Return the train, validation and test samples; see ``build_document_datasets``. Collective."""
    built = build_document_datasets(config, sizes, lambda: True, AnswerDataset)
    return tuple(None if source is None else Conversations(source.dataset) for source in built)


def check_answers(config: AnswerConfig) -> list[str]:
    """Refuse splits without an answer; return a log line for each split that drops or truncates conversations.

    Args:
        config: the result of ``check_splits``.

    Raises:
        ValueError: no conversation of a split has an answer in its first ``--seq-length`` tokens.
    """
    lines = []
    for split, prefixes, share in wanted_parts(config):
        num_kept = num_documents = num_cut = 0
        for prefix in prefixes:
            lengths = read_idx_lengths(prefix)
            part = slice(*document_bounds(share, len(lengths)))
            table = config.table(prefix, (np.cumsum(lengths) - lengths)[part], lengths[part])
            num_kept += len(table)
            num_documents += len(lengths[part])
            num_cut += int(np.count_nonzero(lengths[part] > config.sequence_length))
        if not num_kept:
            raise ValueError(
                f"{', '.join(prefixes)}: no conversation of the {split.name} split has an answer in its first "
                f"--seq-length {config.sequence_length} tokens: raise it, or give another --split or --eval-iters 0"
            )
        if num_cut or num_kept < num_documents:
            lines.append(
                f"> bytescale: {split.name}: {num_kept:,} of {num_documents:,} conversations have an answer in their "
                f"first {config.sequence_length:,} tokens; {num_cut:,} are cut there"
            )
    return lines
