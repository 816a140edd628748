"""Weights of the losses of tokens: a mask of answers (supervised fine-tuning), or real numbers such as advantages.

A row of a micro-batch has the weight of its *label*, even if the label token is on another rank. Normalizations divide
the loss of a step by its tokens or by its documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from bytescale_ext.data.samples.packed import PackedMicroBatch, TokenSource


@runtime_checkable
class WeightSource(Protocol):
    """A ``TokenSource`` that has a weight for the loss of each token."""

    def weights(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        """Return the weights of the tokens [start, stop) of a sample: float32 [stop - start].

        Positions past the end of the sample have the weight 0.
        """
        ...


@runtime_checkable
class PairSource(Protocol):
    """A ``TokenSource`` of pairs of answers."""

    def reference_sums(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the weighted log-probability of sequences under the reference model, 0 without one: [sequences]."""
        ...


def with_weights(packed: PackedMicroBatch, source: WeightSource, sample_ids: Sequence[int]) -> PackedMicroBatch:
    """Return a micro-batch or slice whose rows have the weights of their labels.

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
            mask[rows] *= source.weights(sample_ids[shard.seq], start + 1, stop + 1)
            row = rows.stop
    return replace(packed, loss_mask=torch.from_numpy(mask))


def with_document_means(
    packed: PackedMicroBatch, source: TokenSource, sample_ids: Sequence[int], lengths: Sequence[int]
) -> PackedMicroBatch:
    """Return a micro-batch or slice whose loss is a mean over documents of the mean over their labels.

    A label of a document with n labels of a weight other than 0 has 1 / n of its weight. The first of these labels
    counts the document, wherever its row is; so each document counts once in a step.

    Args:
        packed: micro-batch or slice with weights.
        source: samples.
        sample_ids: sample of each sequence of the plan.
        lengths: tokens of each sequence of the plan.
    """
    mask = packed.loss_mask.numpy().copy()
    counts = np.zeros_like(mask)
    row = 0
    for shard in packed.micro_batch.shards:
        has_loss = label_weights(source, sample_ids[shard.seq], lengths[shard.seq]) != 0
        first, num_labels = int(has_loss.argmax()), int(np.count_nonzero(has_loss))
        for start, stop in shard.ranges:
            rows = slice(row, row + stop - start)
            mask[rows] /= max(1, num_labels)
            if num_labels and start <= first < stop:
                counts[row + first - start] = 1.0
            row = rows.stop
    return replace(packed, loss_mask=torch.from_numpy(mask), label_counts=torch.from_numpy(counts))


def label_weights(source: TokenSource, sample_id: int, length: int) -> np.ndarray:
    """Return the weight of the label of each token of a sample: float32 [length]."""
    if isinstance(source, WeightSource):
        return np.asarray(source.weights(sample_id, 1, length + 1), dtype=np.float32)
    weights = np.ones(length, dtype=np.float32)
    weights[-1] = len(source.read(sample_id, length - 1, length + 1)) == 2
    return weights
