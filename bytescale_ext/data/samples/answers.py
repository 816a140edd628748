"""Weights of the losses of tokens: a mask of answers (supervised fine-tuning), or real numbers such as advantages.

A row of a micro-batch has the weight of its *label*, even if the label token is on another rank. Normalizations divide
the loss of a step by its tokens, its documents, or its groups of documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
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
class GroupSource(Protocol):
    """A ``TokenSource`` whose samples are groups of documents, which it numbers and reads one by one."""

    def members(self, number: int) -> tuple[int, ...]:
        """Return the documents of the group of a document."""
        ...

    def sample_lengths(self, samples: Sequence[int]) -> np.ndarray:
        """Return the numbers of tokens of groups: [samples]."""
        ...


@runtime_checkable
class PairSource(Protocol):
    """A ``TokenSource`` of pairs of answers."""

    def reference_sums(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the weighted log-probability of sequences under the reference model, 0 without one: [sequences]."""
        ...


@runtime_checkable
class RolloutSource(Protocol):
    """A ``TokenSource`` of recorded rollouts."""

    def rollout_numbers(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return old log-probability, advantage and reference log-probability of tokens, float32 [stop - start, 3].

        Positions past the end of the sequence have 0.
        """
        ...


def with_weights(packed: PackedMicroBatch, source: WeightSource, sample_ids: Sequence[int]) -> PackedMicroBatch:
    """Return a micro-batch or slice whose rows have the weights of their labels.

    Args:
        packed: micro-batch or slice, whose token ranges are contiguous in the rows [num_rows].
        source: samples.
        sample_ids: sample of each sequence of the plan.
    """
    weights = _of_labels(packed, source.weights, sample_ids)
    return replace(packed, loss_mask=packed.loss_mask * weights)


def with_rollouts(packed: PackedMicroBatch, source: RolloutSource, sample_ids: Sequence[int]) -> PackedMicroBatch:
    """Return a micro-batch or slice whose rows have the numbers of their labels; see ``with_weights``."""
    return replace(packed, rollouts=_of_labels(packed, source.rollout_numbers, sample_ids, 3))


def _of_labels(
    packed: PackedMicroBatch, read: Callable[[int, int, int], np.ndarray], sample_ids: Sequence[int], *columns: int
) -> torch.Tensor:
    """Return the numbers of each row's label, float32 [num_rows, *columns]; padding has 0.

    ``read``: function from a sample and its tokens [start, stop) to their numbers.
    """
    numbers = np.zeros((packed.num_rows, *columns), dtype=np.float32)
    row = 0
    for shard in packed.micro_batch.shards:
        for start, stop in shard.ranges:
            numbers[row : row + stop - start] = read(sample_ids[shard.seq], start + 1, stop + 1)
            row += stop - start
    return torch.from_numpy(numbers)


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of one sequence with a weight other than 0.

    Attributes:
        count: number of these labels.
        first: row of the first, counted from the beginning of the sequence; 0 without labels.
    """

    count: int
    first: int

    @classmethod
    def of(cls, source: TokenSource, sample_id: int, length: int) -> Labels:
        """Return the labels of a sample of ``length`` tokens."""
        has_loss = label_weights(source, sample_id, length) != 0
        return cls(int(np.count_nonzero(has_loss)), int(has_loss.argmax()))


def with_means(
    batches: Sequence[PackedMicroBatch],
    source: TokenSource,
    sample_ids: Sequence[int],
    lengths: Sequence[int],
    members: Callable[[int], tuple[int, ...]],
) -> list[PackedMicroBatch]:
    """Return micro-batches or slices whose loss is a mean over documents, or groups, of the mean over their labels.

    A label of a group with n labels of a weight other than 0 has 1 / n of its weight, and so have later tokens. The
    first of these labels counts the group, wherever its row is; so each group counts once in a step. A document alone
    is a group of one.

    Args:
        batches: micro-batches or slices with weights, also of their later tokens.
        source: samples.
        sample_ids: sample of each sequence of the plan.
        lengths: tokens of each sequence of the plan.
        members: function from a sample to the samples of its group, in order.
    """
    length_of = dict(zip(sample_ids, lengths, strict=True))
    labels = cache(lambda sample_id: Labels.of(source, sample_id, length_of[sample_id]))

    def count_of(group: tuple[int, ...]) -> tuple[int, int | None]:
        """Return the number of labels of a group, and the sample that has the first."""
        counts = [labels(sample_id).count for sample_id in group]
        return sum(counts), next((one for one, count in zip(group, counts, strict=True) if count), None)

    return [_with_means(packed, sample_ids, labels, lambda one: count_of(members(one))) for packed in batches]


def _with_means(
    packed: PackedMicroBatch,
    sample_ids: Sequence[int],
    labels: Callable[[int], Labels],
    count_of: Callable[[int], tuple[int, int | None]],
) -> PackedMicroBatch:
    """Return one micro-batch or slice of ``with_means``."""
    mask = packed.loss_mask.numpy().copy()
    counts = np.zeros_like(mask)
    future = None if packed.future_weights is None else packed.future_weights.clone()
    row = 0
    for shard in packed.micro_batch.shards:
        sample_id = sample_ids[shard.seq]
        num_labels, counted = count_of(sample_id)
        first = labels(sample_id).first if counted == sample_id else -1
        for start, stop in shard.ranges:
            rows = slice(row, row + stop - start)
            mask[rows] /= max(1, num_labels)
            if future is not None:
                future[rows] /= max(1, num_labels)
            if start <= first < stop:
                counts[row + first - start] = 1.0
            row = rows.stop
    return replace(
        packed, loss_mask=torch.from_numpy(mask), label_counts=torch.from_numpy(counts), future_weights=future
    )


def label_weights(source: TokenSource, sample_id: int, length: int) -> np.ndarray:
    """Return the weight of the label of each token of a sample: float32 [length]."""
    if isinstance(source, WeightSource):
        return np.asarray(source.weights(sample_id, 1, length + 1), dtype=np.float32)
    weights = np.ones(length, dtype=np.float32)
    weights[-1] = len(source.read(sample_id, length - 1, length + 1)) == 2
    return weights
