"""Tokens after the next token, which draft heads and multi-token prediction learn to predict.

They are read from the sample, so a ring shard needs no communication for tokens past its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bytescale_ext.data.samples.answers import label_weights
from bytescale_ext.data.samples.packed import TokenSource
from bytescale_ext.plan.step.micro_batch import MicroBatch

NO_TOKEN = -1


def future_tokens(
    micro_batch: MicroBatch,
    source: TokenSource,
    sample_ids: Sequence[int],
    lengths: Sequence[int],
    num_rows: int,
    count: int,
) -> torch.Tensor:
    """Return the ``count`` tokens after the label of each row, int64 [num_rows, count].

    Padding, and positions past the label of a sample's last token, are ``NO_TOKEN``. So the tokens never extend past
    the end of a document.

    Args:
        micro_batch: token ranges of the step's plan.
        source: samples.
        sample_ids: sample of each sequence of the plan.
        lengths: tokens of each sequence of the plan.
        num_rows: number of rows, including padding.
        count: number of tokens per row.
    """
    future = np.full((num_rows, count), NO_TOKEN, dtype=np.int64)
    row = 0
    for shard in micro_batch.shards:
        for start, stop in shard.ranges:
            last = min(stop + count, lengths[shard.seq]) + 1
            tokens = source.read(sample_ids[shard.seq], start, last)
            for ahead in range(count):
                column = tokens[ahead + 2 :][: stop - start]
                future[row : row + len(column), ahead] = column
            row += stop - start
    return torch.from_numpy(future)


def no_future(num_rows: int, count: int) -> torch.Tensor:
    """Return ``future_tokens`` of padding: ``NO_TOKEN`` everywhere, int64 [num_rows, count]."""
    return torch.full((num_rows, count), NO_TOKEN)


def future_weights(
    micro_batch: MicroBatch,
    source: TokenSource,
    sample_ids: Sequence[int],
    lengths: Sequence[int],
    num_rows: int,
    count: int,
) -> torch.Tensor:
    """Return the weights of the losses of ``future_tokens``, float32 [num_rows, count]; 0 means no loss.

    If a document has n labels and m of them remain at some depth, each of the m has the weight n / m. So the mean loss
    of every depth counts as much as the mean loss of the next token. Weights depend on the whole document and not on
    the plan. Megatron computes the same for a micro-batch of one document under ``--calculate-per-token-loss``. If the
    source is a ``WeightSource``, each has the weight of its token in addition. Arguments as in ``future_tokens``.
    """
    weights = np.zeros((num_rows, count), dtype=np.float32)
    row = 0
    for shard in micro_batch.shards:
        of_labels = label_weights(source, sample_ids[shard.seq], lengths[shard.seq])
        remaining = [int(np.count_nonzero(of_labels[ahead:])) for ahead in range(count + 1)]
        for start, stop in shard.ranges:
            for ahead in range(1, count + 1):
                column = of_labels[start + ahead : stop + ahead]
                weights[row : row + len(column), ahead - 1] = column * (remaining[0] / max(remaining[ahead], 1))
            row += stop - start
    return torch.from_numpy(weights)
