"""The tokens after the next one, which draft heads and multi-token prediction learn to guess.

They are read from the sample itself, so a ring shard needs no neighbour for the tokens after its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bytescale_ext.data.samples.answers import AnswerSource
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
    """Return the ``count`` tokens after the label of each row, int64 [num_rows, count]; ``NO_TOKEN`` where none is.

    A sample has no tokens beyond the label of its last token, so they never cross the end of a document. Arguments as
    ``pack_micro_batch`` has them; rows after those of the micro-batch are padding.
    """
    future = np.full((num_rows, count), NO_TOKEN, dtype=np.int64)
    row = 0
    for shard in micro_batch.shards:
        for start, stop in shard.ranges:
            last = min(stop + count, lengths[shard.seq]) + 1
            read = source.read(sample_ids[shard.seq], start, last)
            for ahead in range(count):
                found = read[ahead + 2 :][: stop - start]
                future[row : row + len(found), ahead] = found
            row += stop - start
    return torch.from_numpy(future)


def no_future(num_rows: int, count: int) -> torch.Tensor:
    """Return the tokens after the labels of padding: none, int64 [num_rows, count]."""
    return torch.full((num_rows, count), NO_TOKEN)


def future_weights(
    micro_batch: MicroBatch,
    source: TokenSource,
    sample_ids: Sequence[int],
    lengths: Sequence[int],
    num_rows: int,
    count: int,
) -> torch.Tensor:
    """Return the weights of the losses of ``future_tokens``, float32 [num_rows, count]; 0 where there is no loss.

    A document with n labels has m of them left at a depth, and there each has the weight n / m: the mean loss of a
    depth counts as much as that of the next token. The whole document decides, so that weights do not depend on the
    plan. Megatron computes the same for a micro-batch of one document under ``--calculate-per-token-loss``. Where the
    source knows which tokens are answers, only these have a loss.
    """
    weights = np.zeros((num_rows, count), dtype=np.float32)
    row = 0
    for shard in micro_batch.shards:
        of_labels = _has_loss(source, sample_ids[shard.seq], lengths[shard.seq])
        left = [int(of_labels[ahead:].sum()) for ahead in range(count + 1)]
        for start, stop in shard.ranges:
            for ahead in range(1, count + 1):
                found = of_labels[start + ahead : stop + ahead]
                weights[row : row + len(found), ahead - 1] = found * (left[0] / max(left[ahead], 1))
            row += stop - start
    return torch.from_numpy(weights)


def _has_loss(source: TokenSource, sample_id: int, length: int) -> np.ndarray:
    """Return whether the label of each token of a sample has a loss, bool [length]."""
    if isinstance(source, AnswerSource):
        return np.asarray(source.answers(sample_id, 1, length + 1))
    has_label = np.ones(length, dtype=bool)
    has_label[-1] = len(source.read(sample_id, length - 1, length + 1)) == 2
    return has_label
