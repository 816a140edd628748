"""Losses of answers alone: supervised fine-tuning trains on the tokens that an assistant has written.

The mask is of tokens; a row of a micro-batch has a loss if its *label* is an answer, wherever the next token lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from bytescale_ext.data.samples.packed import PackedMicroBatch


@runtime_checkable
class AnswerSource(Protocol):
    """A ``TokenSource`` that knows which tokens are answers."""

    def answers(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        """Return whether tokens [start, stop) of a sample are answers, bool [stop - start]; False past its end."""
        ...


def with_answers_only(packed: PackedMicroBatch, source: AnswerSource, sample_ids: Sequence[int]) -> PackedMicroBatch:
    """Return a micro-batch, or a slice, whose loss mask is 0 where the label is no answer.

    Args:
        packed: its token ranges lie end to end; its loss mask is [num_rows].
        source: the samples.
        sample_ids: sample of each sequence of the plan.
    """
    mask = packed.loss_mask.numpy().copy()
    row = 0
    for shard in packed.micro_batch.shards:
        for start, stop in shard.ranges:
            rows = slice(row, row + stop - start)
            mask[rows] *= source.answers(sample_ids[shard.seq], start + 1, stop + 1)
            row = rows.stop
    return replace(packed, loss_mask=torch.from_numpy(mask))
