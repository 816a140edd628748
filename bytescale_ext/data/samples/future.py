"""The tokens after the next one, which draft heads learn to guess.

They are read from the sample itself, so a ring shard needs no neighbour for the tokens after its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

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
