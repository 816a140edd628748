"""Loss mask for supervised fine-tuning, which trains only on answers: the tokens written by the assistant.

A row of a micro-batch has a loss if its *label* is an answer, even if the label token is on another rank.
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
    """A ``TokenSource`` that tells which tokens are answers."""

    def answers(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        """Return whether each of the tokens [start, stop) of a sample is an answer: bool [stop - start].

        Positions past the end of the sample are False.
        """
        ...


def with_answers_only(packed: PackedMicroBatch, source: AnswerSource, sample_ids: Sequence[int]) -> PackedMicroBatch:
    """Return a micro-batch or slice with a loss mask of 0 in every row whose label is not an answer.

    Args:
        packed: micro-batch or slice, whose token ranges are contiguous in the rows [num_rows].
        source: samples.
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
