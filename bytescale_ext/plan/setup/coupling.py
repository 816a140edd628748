"""Ranks that share experts wait for each other in every slot, because their layers exchange tokens."""

from __future__ import annotations

import numpy as np

from bytescale_ext.plan.evaluate.replay import StageReplay


def coupling(result: StageReplay, num_slices: int, expert_parallel: int) -> float:
    """Return how many times as long a step takes because ranks that share experts run slot by slot.

    A slot takes a group of them as long as its slowest rank. The replay of a plan lets ranks run on, so its time grows
    by the ratio of the busiest stage of a group, slot by slot, to the busiest stage of a rank, which is exact without
    pipelines and rings.
    """
    if expert_parallel == 1:
        return 1.0
    seconds, stages = result.stops - result.starts, result.num_stages
    of_stages = seconds.sum(axis=1).reshape(len(seconds), -1, stages).sum(axis=1)
    stops = result.counts.cumsum() * num_slices
    ranks = [of_stages[stop - count * num_slices : stop] for stop, count in zip(stops, result.counts, strict=True)]
    groups = [ranks[first : first + expert_parallel] for first in range(0, len(ranks), expert_parallel)]
    alone = max(float(rank.sum(axis=0).max()) for rank in ranks)
    coupled = max(float(np.max(group, axis=0).sum(axis=0).max()) for group in groups)
    return coupled / alone if alone else 1.0
