"""One rank's micro-batch as tensors: its token ranges laid end to end, read from the data set and nothing else.

Rows of a micro-batch with a ring shard of document A (two ranges) and a whole document B::

    row        0         n0         n0+n1        n0+n1+n2     num_rows
               | A front | A back   | B          | padding    |
    position   | 0 .. n0 | s-n1 .. s| 0 .. n2    | 0 ..       |
    loss_mask  | 1 ...   | 1 .. (0) | 1 ...  (0) | 0 ..       |

The label of a token is the next token of its document, also when that token lies on another rank or in the
next sample. A document's last token has none: there the label and the loss mask are 0, marked (0) above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from bytescale_ext.attention.layout import AttentionLayout
from bytescale_ext.attention.slice_layout import SliceLayout
from bytescale_ext.plan.shapes import MicroBatch


class TokenSource(Protocol):
    """Samples that can be read in part. A sample is one document, or a piece of one."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def length(self, sample_id: int) -> int:
        """Tokens of a sample, without reading one."""
        ...

    def read(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a sample, int64; ``stop`` may be one past its end.

        That last token is the document's next one; it is left out where the document ends.
        """
        ...

    def describe(self, sample_id: int) -> str:
        """Where the sample is from, for messages."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class PackedMicroBatch:
    """What one forward pass of one rank reads.

    Attributes:
        tokens: int64 [num_rows], token ids; 0 in padding.
        labels: int64 [num_rows], next token of the same document; 0 where there is none.
        positions: int64 [num_rows], position in the sample; 0 in padding.
        loss_mask: float32 [num_rows], 1 where the label counts, else 0.
        micro_batch: the plan's, or a slice of it; its tokens are the first ``micro_batch.num_tokens`` rows.
        documents: for each shard, where it is from (for messages).
        layout: which rows attend to which, where that is known (``units.py``).
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    micro_batch: MicroBatch
    documents: tuple[str, ...]
    layout: AttentionLayout | SliceLayout | None = None

    @property
    def num_rows(self) -> int:
        """Rows with padding: a multiple of what ``pack_micro_batch`` was given."""
        return int(self.tokens.shape[0])

    def pinned(self) -> PackedMicroBatch:
        """The same in page-locked memory, from which a copy to a CUDA device can run in the background."""
        return self._map(lambda tensor: tensor if tensor.is_pinned() else tensor.pin_memory())

    def to(self, device: torch.device | str) -> PackedMicroBatch:
        """The same on ``device``. To CUDA the copy goes through page-locked memory and does not block the host."""
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
        )


def pack_micro_batch(
    micro_batch: MicroBatch,
    source: TokenSource,
    sample_ids: Sequence[int],
    rows_multiple: int,
    lengths: Sequence[int],
    vocab_size: int | None = None,
) -> PackedMicroBatch:
    """Read the token ranges of one micro-batch, and no others but the one label token after each range.

    Args:
        micro_batch: from the step's plan.
        source: where tokens come from.
        sample_ids: sample of each ``seq`` of the plan.
        rows_multiple: padding is added at the end up to a multiple of this.
        lengths: tokens of each ``seq`` of the plan.
        vocab_size: token ids must be below it; None: not checked.

    Raises:
        ValueError: a token id is outside the vocabulary (the document is named).
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


def dummy_micro_batch(rows: int) -> PackedMicroBatch:
    """A micro-batch of padding alone, for a rank that has none in a step: its loss mask is 0 everywhere."""
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
    """Tokens, labels and loss mask of ``num_tokens`` tokens, given them and, unless the document ends, the next one.

    Args:
        read: integers [num_tokens + 1], or [num_tokens] at the end of the document.

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
    """The rows of so many tokens: the next multiple."""
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
