"""Packed tensors of one rank's micro-batch: its token ranges end to end. No other tokens are read.

Rows of a micro-batch with a ring shard of document A (two ranges) and a whole document B::

    row        0         n0         n0+n1        n0+n1+n2     num_rows
               | A front | A back   | B          | padding    |
    position   | 0 .. n0 | s-n1 .. s| 0 .. n2    | 0 ..       |
    loss_mask  | 1 ...   | 1 .. (0) | 1 ...  (0) | 0 ..       |

The label of a token is the next token of its document, even if that token is on another rank or in the next sample.
The last token of a document has no label: label and loss mask are 0, marked (0) above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from bytescale_ext.attention.layouts.layout import AttentionLayout
from bytescale_ext.attention.layouts.slices import SliceLayout
from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.plan.step.micro_batch import MicroBatch


class TokenSource(Protocol):
    """Samples that can be read in parts. A sample is a document or a piece of a document."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def length(self, sample_id: int) -> int:
        """Return the number of tokens of a sample, without reading the tokens."""
        ...

    def read(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of a sample, int64 [stop - start].

        ``stop`` may be one past the end of the sample, to include the next token of the document as the label of the
        last token. At the end of the document that token is missing.
        """
        ...

    def describe(self, sample_id: int) -> str:
        """Return the origin of a sample, for messages."""
        ...


@runtime_checkable
class LengthSource(Protocol):
    """A ``TokenSource`` that finds the lengths of many samples at once."""

    def lengths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the tokens of samples [n], without reading the tokens: int64 [n]."""
        ...


def lengths_of(source: TokenSource, sample_ids: Sequence[int]) -> np.ndarray:
    """Return the tokens of samples: int64 [len(sample_ids)]."""
    if not isinstance(source, LengthSource):
        return np.array([source.length(i) for i in sample_ids], dtype=np.int64)
    if isinstance(sample_ids, range):  # numpy would read a range number by number
        return source.lengths(np.arange(sample_ids.start, sample_ids.stop, sample_ids.step))
    return source.lengths(np.array(sample_ids, dtype=np.int64))


@dataclass(frozen=True, eq=False, slots=True)
class PackedMicroBatch:
    """Input of one forward pass of one rank.

    Attributes:
        tokens: token ids, 0 in padding; int64 [num_rows].
        labels: next token of the same document, 0 without one; int64 [num_rows].
        positions: position in the sample, 0 in padding; int64 [num_rows].
        loss_mask: weight of the loss of each row: 1 for rows with a label, or the weight of the label in the data set;
            0 without a label; float32 [num_rows].
        micro_batch: micro-batch of the plan or a slice of it, whose tokens are the first ``micro_batch.num_tokens``
            rows.
        documents: origin of each shard, for messages.
        layout: rows that attend to each other, set by ``units.py``.
        counted_lengths: lengths of the sequences that this rank counts, set by ``units.py``.
        window_layout: ``layout`` of layers with a sliding window, or None.
        future: tokens after each label (``future.py``), int64 [num_rows, count]; None if nothing predicts them.
        future_weights: weights of their losses in multi-token prediction, float32 [num_rows, count]; else None.
        gram_rows: rows of an n-gram memory, int64 [num_rows, columns]; None in models without one.
        label_counts: share of each row in the divisor of the loss, float32 [num_rows]; None: 1 if its weight is not 0.
        rollouts: numbers of the label of each row (``RolloutSource``), float32 [num_rows, 3]; None without rollouts.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    micro_batch: MicroBatch
    documents: tuple[str, ...]
    layout: AttentionLayout | SliceLayout | None = None
    counted_lengths: tuple[int, ...] = ()
    window_layout: AttentionLayout | SliceLayout | None = None
    future: torch.Tensor | None = None
    future_weights: torch.Tensor | None = None
    gram_rows: torch.Tensor | None = None
    label_counts: torch.Tensor | None = None
    rollouts: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows, including padding."""
        return int(self.tokens.shape[0])

    @property
    def num_labels(self) -> torch.Tensor:
        """Share of this micro-batch in the divisor of the step's loss: a scalar."""
        return torch.count_nonzero(self.loss_mask) if self.label_counts is None else self.label_counts.sum()

    def documents_text(self, limit: int = 4) -> str:
        """Return the origin of the first documents, for an error message."""
        more = f" and {len(self.documents) - limit} more" if len(self.documents) > limit else ""
        return ", ".join(self.documents[:limit]) + more or "padding only"

    def pinned(self) -> PackedMicroBatch:
        """Return a copy in page-locked memory, which allows asynchronous copies to a CUDA device."""
        return self._map(lambda tensor: tensor if tensor.is_pinned() else tensor.pin_memory())

    def to(self, device: torch.device | str) -> PackedMicroBatch:
        """Return a copy on ``device``. A copy to CUDA goes through page-locked memory and does not block the host."""
        target = torch.device(device)
        if target.type != "cuda":
            return self._map(lambda tensor: tensor.to(target))
        source = self.pinned() if self.tokens.device.type == "cpu" else self
        return source._map(lambda tensor: tensor.to(target, non_blocking=True))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedMicroBatch:
        return replace(
            self,
            tokens=change(self.tokens),
            labels=change(self.labels),
            positions=change(self.positions),
            loss_mask=change(self.loss_mask),
            future=None if self.future is None else change(self.future),
            future_weights=None if self.future_weights is None else change(self.future_weights),
            gram_rows=None if self.gram_rows is None else change(self.gram_rows),
            label_counts=None if self.label_counts is None else change(self.label_counts),
            rollouts=None if self.rollouts is None else change(self.rollouts),
        )


def pack_micro_batch(
    micro_batch: MicroBatch,
    source: TokenSource,
    sample_ids: Sequence[int],
    rows_multiple: int,
    lengths: Sequence[int],
    vocab_size: int | None = None,
) -> PackedMicroBatch:
    """Read the token ranges of one micro-batch, each with the label of its last token.

    Args:
        micro_batch: token ranges of the step's plan.
        source: samples.
        sample_ids: sample of each sequence of the plan.
        rows_multiple: number to whose multiple the rows are padded.
        lengths: tokens of each sequence of the plan.
        vocab_size: upper limit of token ids; None skips the check.

    Raises:
        ValueError: a token id is outside the vocabulary; the message names the document.
    """
    num_rows = padded(micro_batch.num_tokens, rows_multiple)
    tokens, labels, positions = (np.zeros(num_rows, dtype=np.int64) for _ in range(3))
    loss_mask = np.zeros(num_rows, dtype=np.float32)
    row, documents = 0, list[str]()
    for shard in micro_batch.shards:
        sample_id = sample_ids[shard.seq]
        for start, stop in shard.ranges:
            assert 0 <= start < stop <= lengths[shard.seq], f"{start=} {stop=} {lengths[shard.seq]=}"
            rows = slice(row, row + stop - start)
            ids = source.read(sample_id, start, stop + 1)
            _check_ids(ids, source, sample_id, start, stop, vocab_size)
            tokens[rows], labels[rows], loss_mask[rows] = shift_labels(ids, stop - start)
            positions[rows] = np.arange(start, stop)
            row = rows.stop
        documents.append(source.describe(sample_id))
    return PackedMicroBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        loss_mask=torch.from_numpy(loss_mask),
        micro_batch=micro_batch,
        documents=tuple(documents),
    )


def with_gram_rows(
    packed: PackedMicroBatch, rule: GramRule, source: TokenSource, sample_ids: Sequence[int]
) -> PackedMicroBatch:
    """Return a micro-batch or slice with the rows of its n-grams; padding has row 0.

    Of the tokens before a ring shard or slice, only the few that its first n-grams contain are read.

    Args:
        packed: micro-batch or slice.
        rule: rule that maps tokens to rows.
        source: samples; n-grams do not extend past the start of a sample.
        sample_ids: sample of each sequence of the plan.
    """
    tokens = packed.tokens.numpy()
    rows = np.zeros((packed.num_rows, rule.num_columns), dtype=np.int64)
    first = 0
    for shard in packed.micro_batch.shards:
        for start, stop in shard.ranges:
            num_before = min(start, rule.num_before)
            last = first + stop - start
            before = source.read(sample_ids[shard.seq], start - num_before, start)
            rows[first:last] = rule.rows_of(np.concatenate([before, tokens[first:last]]), num_before)
            first = last
    return replace(packed, gram_rows=torch.from_numpy(rows))


def dummy_micro_batch(rows: int) -> PackedMicroBatch:
    """Return a micro-batch of padding, with a loss mask of 0, for a rank without work in a step."""
    zeros = torch.zeros(rows, dtype=torch.int64)
    return PackedMicroBatch(
        tokens=zeros,
        labels=zeros.clone(),
        positions=zeros.clone(),
        loss_mask=torch.zeros(rows, dtype=torch.float32),
        micro_batch=MicroBatch(()),
        documents=(),
    )


def shift_labels(ids: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens, labels, loss mask), each [num_tokens].

    ``ids``: the tokens and the next token, [num_tokens + 1]; at the end of a document only [num_tokens].
    """
    tokens, labels = ids[:num_tokens], np.zeros(num_tokens, dtype=ids.dtype)
    loss_mask = np.zeros(num_tokens, dtype=np.float32)
    num_labels = len(ids) - 1
    labels[:num_labels] = ids[1:]
    loss_mask[:num_labels] = 1.0
    return tokens, labels, loss_mask


def padded(num_tokens: int, rows_multiple: int) -> int:
    """Return ``num_tokens``, rounded up to a multiple of ``rows_multiple``."""
    assert rows_multiple >= 1, f"{rows_multiple=}"
    return -(-num_tokens // rows_multiple) * rows_multiple


def _check_ids(
    ids: np.ndarray, source: TokenSource, sample_id: int, start: int, stop: int, vocab_size: int | None
) -> None:
    assert len(ids) - (stop - start) in (0, 1), f"{len(ids)=} {start=} {stop=} {source.describe(sample_id)}"
    if vocab_size is None or (int(ids.max()) < vocab_size and int(ids.min()) >= 0):
        return
    bad = int(np.argmax((ids >= vocab_size) | (ids < 0)))
    raise ValueError(
        f"{source.describe(sample_id)}: token {start + bad} of the sample has the id {int(ids[bad])}, outside the "
        f"vocabulary of {vocab_size}: train with the tokenizer that wrote the data set, or give its vocabulary with "
        "--vocab-size"
    )
