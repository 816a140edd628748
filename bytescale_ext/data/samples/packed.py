"""One rank's micro-batch as tensors: its token ranges laid end to end. Reads no other tokens.

Rows of a micro-batch with a ring shard of document A (two ranges) and a whole document B::

    row        0         n0         n0+n1        n0+n1+n2     num_rows
               | A front | A back   | B          | padding    |
    position   | 0 .. n0 | s-n1 .. s| 0 .. n2    | 0 ..       |
    loss_mask  | 1 ...   | 1 .. (0) | 1 ...  (0) | 0 ..       |

The label of a token is the next token of its document, even if that token lies on another rank or in the next
sample. The last token of a document has no label: label and loss mask are 0 there, marked (0) above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from bytescale_ext.attention.layouts.layout import AttentionLayout
from bytescale_ext.attention.layouts.slices import SliceLayout
from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.plan.step.micro_batch import MicroBatch


class TokenSource(Protocol):
    """Samples that can be read in part. A sample is a document or a piece of one."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def length(self, sample_id: int) -> int:
        """Return the number of tokens of a sample, without reading them."""
        ...

    def read(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of a sample, int64 [stop - start].

        ``stop`` may be one past the end of the sample. That token is the next one of the document, left out where the
        document ends.
        """
        ...

    def describe(self, sample_id: int) -> str:
        """Return where the sample is from, for messages."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class PackedMicroBatch:
    """The input of one forward pass of one rank. Plain data.

    Attributes:
        tokens: int64 [num_rows], token ids; 0 in padding.
        labels: int64 [num_rows], next token of the same document; 0 where there is none.
        positions: int64 [num_rows], position in the sample; 0 in padding.
        loss_mask: float32 [num_rows], 1 where there is a label, else 0.
        micro_batch: the plan's, or a slice of it; its tokens are the first ``micro_batch.num_tokens`` rows.
        documents: where each shard is from, for messages.
        layout: which rows attend to which; set by ``units.py``.
        counted_lengths: tokens of the sequences that this rank counts; set by ``units.py``.
        window_layout: as ``layout``, in layers with a window; None in models without them.
        future: int64 [num_rows, count], the tokens after each label (``future.py``); None where nothing guesses them.
        future_weights: float32 [num_rows, count], weights of their losses in multi-token prediction; else None.
        gram_rows: int64 [num_rows, columns], rows of n-grams; set by the loader, None in models without their memory.
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

    @property
    def num_rows(self) -> int:
        """Rows with padding."""
        return int(self.tokens.shape[0])

    def documents_text(self, limit: int = 4) -> str:
        """Return where the first documents are from, for an error message."""
        more = f" and {len(self.documents) - limit} more" if len(self.documents) > limit else ""
        return ", ".join(self.documents[:limit]) + more or "padding only"

    def pinned(self) -> PackedMicroBatch:
        """Return a copy in page-locked memory, from which copies to a CUDA device run in the background."""
        return self._map(lambda tensor: tensor if tensor.is_pinned() else tensor.pin_memory())

    def to(self, device: torch.device | str) -> PackedMicroBatch:
        """Return a copy on ``device``; to CUDA through page-locked memory, without blocking the host."""
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
        )


def pack_micro_batch(
    micro_batch: MicroBatch,
    source: TokenSource,
    sample_ids: Sequence[int],
    rows_multiple: int,
    lengths: Sequence[int],
    vocab_size: int | None = None,
) -> PackedMicroBatch:
    """Read the token ranges of one micro-batch, each with the label token after it.

    Args:
        micro_batch: token ranges of the step's plan.
        source: the samples.
        sample_ids: sample of each ``seq`` of the plan.
        rows_multiple: padding is added at the end up to a multiple of this.
        lengths: tokens of each ``seq`` of the plan.
        vocab_size: token ids must be below it; None: not checked.

    Raises:
        ValueError: a token id is outside the vocabulary; the message names the document.
    """
    num_rows = padded(micro_batch.num_tokens, rows_multiple)
    tokens, labels, positions = (np.zeros(num_rows, dtype=np.int64) for _ in range(3))
    loss_mask = np.zeros(num_rows, dtype=np.float32)
    row = 0
    for shard in micro_batch.shards:
        sample_id = sample_ids[shard.seq]
        for start, stop in shard.ranges:
            assert 0 <= start < stop <= lengths[shard.seq], f"{start=} {stop=} {lengths[shard.seq]=}"
            rows = slice(row, row + stop - start)
            read = source.read(sample_id, start, stop + 1)
            _check_read(read, source, sample_id, start, stop, vocab_size)
            tokens[rows], labels[rows], loss_mask[rows] = shift_labels(read, stop - start)
            positions[rows] = np.arange(start, stop)
            row = rows.stop
    return PackedMicroBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        loss_mask=torch.from_numpy(loss_mask),
        micro_batch=micro_batch,
        documents=tuple(source.describe(sample_ids[shard.seq]) for shard in micro_batch.shards),
    )


def with_gram_rows(
    packed: PackedMicroBatch, rule: GramRule, source: TokenSource, sample_ids: Sequence[int]
) -> PackedMicroBatch:
    """Return a micro-batch, or a slice, with the rows of its n-grams; padding has row 0.

    Before a ring's shard or a slice only the few tokens are read that its first n-grams begin with.

    Args:
        packed: its token ranges lie end to end.
        rule: which rows belong to a token.
        source: the samples; n-grams begin where a sample does.
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
    """Return a micro-batch of padding, for a rank without work in a step: its loss mask is 0 everywhere."""
    zeros = torch.zeros(rows, dtype=torch.int64)
    return PackedMicroBatch(
        tokens=zeros,
        labels=zeros.clone(),
        positions=zeros.clone(),
        loss_mask=torch.zeros(rows, dtype=torch.float32),
        micro_batch=MicroBatch(()),
        documents=(),
    )


def shift_labels(read: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, labels and loss mask of ``num_tokens`` tokens.

    Args:
        read: the tokens and the next one, [num_tokens + 1]; [num_tokens] at the end of the document.

    Returns:
        tokens, labels (as ``read``) and loss mask (float32), each [num_tokens].
    """
    tokens, labels = read[:num_tokens], np.zeros(num_tokens, dtype=read.dtype)
    loss_mask = np.zeros(num_tokens, dtype=np.float32)
    num_labels = len(read) - 1
    labels[:num_labels] = read[1:]
    loss_mask[:num_labels] = 1.0
    return tokens, labels, loss_mask


def padded(num_tokens: int, rows_multiple: int) -> int:
    """Return ``num_tokens`` rounded up to a multiple."""
    assert rows_multiple >= 1, f"{rows_multiple=}"
    return -(-num_tokens // rows_multiple) * rows_multiple


def _check_read(
    read: np.ndarray, source: TokenSource, sample_id: int, start: int, stop: int, vocab_size: int | None
) -> None:
    assert len(read) - (stop - start) in (0, 1), f"{len(read)=} {start=} {stop=} {source.describe(sample_id)}"
    if vocab_size is None or (int(read.max()) < vocab_size and int(read.min()) >= 0):
        return
    bad = int(np.argmax((read >= vocab_size) | (read < 0)))
    raise ValueError(
        f"{source.describe(sample_id)}: token {start + bad} of the sample has the id {int(read[bad])}, outside the "
        f"vocabulary of {vocab_size}: train with the tokenizer that wrote the data set, or give its vocabulary with "
        "--vocab-size"
    )
