"""The planning problem of one step, which every planner takes, and the fewest ranks that hold each sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.activation.offload import OffloadLimits
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.hdp.ring_speeds import RingSpeeds
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Problem:
    """One step to plan.

    Attributes:
        lengths: tokens of each sequence: [n].
        min_widths: the fewest ranks that hold each sequence: [n].
        cluster: HDP ranks; with pipelines, each rank is a pipeline.
        stages: cost of each pipeline stage, the slowest stage last; a single stage without pipelines.
        slicing: slicing of micro-batches on each stage.
        aligned: whether the plan must have aligned slots (``StepPlan.aligned``).
        static_width: ranks of each group of a static mesh; only ``place_static`` reads it.
        is_uneven: whether rings over ranks of unlike speeds may have uneven shares; only ``place_balanced`` reads it.
    """

    lengths: Ints
    min_widths: Ints
    cluster: Cluster
    stages: tuple[StageCost, ...]
    slicing: Slicing = ONE_SLICE
    aligned: bool = False
    static_width: int | None = None
    is_uneven: bool = False

    @property
    def num_ranks(self) -> int:
        return self.cluster.num_ranks

    @cached_property
    def ring_speeds(self) -> RingSpeeds:
        """Speeds and shares of rings."""
        return RingSpeeds(self.cluster, self.is_uneven)

    @property
    def tokens_per_rank(self) -> int:
        return self.cluster.tokens_per_rank

    @property
    def stage(self) -> StageCost:
        """Cost of the slowest stage, which planners balance."""
        return self.stages[-1]

    @property
    def cost(self) -> CostModel:
        """Cost of the slowest stage, forward and backward together."""
        return self.stage.both

    def longest_first(self) -> tuple[Problem, Ints]:
        """Return the problem with its longest sequences first (tie: lower index), and their original indices: [n]."""
        in_order = np.argsort(-self.lengths, kind="stable")
        return replace(self, lengths=self.lengths[in_order], min_widths=self.min_widths[in_order]), in_order

    def mean_seconds(self) -> float:
        """Return the time of a step whose rings have their fewest ranks and whose work is spread evenly.

        It is a lower bound of the time of every plan.
        """
        launches = -(-int(self.lengths.sum()) // (self.num_ranks * self.tokens_per_rank))
        floor = self.cost.floor()
        seconds = floor.sequence_cost(self.lengths.astype(np.float64), self.min_widths.astype(np.float64))
        mean = float((self.min_widths * seconds).sum()) / self.num_ranks + self.cost.g * launches
        return mean / float(self.cluster.rank_speeds().mean())

    def longest_seconds(self) -> float:
        """Return the time of the longest sequence at its best width: a lower bound of the time of every plan.

        There is at least one sequence.
        """
        longest = int(self.lengths.argmax())
        widths = np.arange(self.min_widths[longest], self.num_ranks + 1, dtype=np.float64)
        lengths = np.full(len(widths), float(self.lengths[longest]))
        seconds = float(self.cost.sequence_cost(lengths, widths).min()) + self.cost.g
        return seconds / float(self.cluster.rank_speeds().max())


def checked_lengths(lengths: Sequence[int], cluster: Cluster, tokens_multiple: int) -> Ints:
    """Return the lengths as an array: [n].

    Raises:
        ValueError: a sequence is empty, or C is not a multiple of ``tokens_multiple``.
    """
    if tokens_multiple < 1:
        raise ValueError(f"the tokens multiple is {tokens_multiple}; it must be at least 1")
    if cluster.tokens_per_rank % tokens_multiple:
        raise ValueError(
            f"tokens per rank {cluster.tokens_per_rank} is not a multiple of {tokens_multiple}, to which micro-batches "
            f"are padded; use {cluster.tokens_per_rank + -cluster.tokens_per_rank % tokens_multiple}"
        )
    sizes = np.array(lengths, dtype=np.int64)
    if (sizes < 1).any():
        seq = int((sizes < 1).argmax())
        raise ValueError(f"sequence {seq} has {sizes[seq]} tokens; drop it, a sequence needs at least 1")
    return sizes


def min_widths(
    sizes: Ints,
    cluster: Cluster,
    tokens_multiple: int = 1,
    limits: OffloadLimits | None = None,
    forward: CostModel | None = None,
) -> Ints:
    """Return the fewest ranks that hold each sequence, ``ceil(s / C)`` or, with offloading, ByteScale's Eq. 3: [n].

    Args:
        sizes: tokens of each sequence: [n].
        cluster: the ranks.
        tokens_multiple: multiple of tokens to which micro-batches are padded.
        limits, forward: limits of offloading and the forward cost of a stage; None: nothing is offloaded.

    Raises:
        ValueError: all ranks together cannot hold a sequence. The message names the smallest C with which they can.
    """
    num_ranks, tokens_per_rank = cluster.num_ranks, cluster.tokens_per_rank
    capacities = np.full(len(sizes), tokens_per_rank, dtype=np.int64)
    if limits is not None and forward is not None:
        offloaded = limits.max_tokens(sizes.astype(np.float64), tokens_per_rank, forward)
        useful = np.maximum(sizes + tokens_multiple, tokens_per_rank)
        capacities = np.floor(np.minimum(offloaded, useful)).astype(np.int64)
        capacities -= capacities % tokens_multiple
    widths = -(-sizes // capacities)
    if (widths <= num_ranks).all():
        return widths
    seq = int((widths - num_ranks).argmax())
    without_offload = _min_capacity(int(sizes[seq]), num_ranks, tokens_multiple)
    text = (
        f"more than {num_ranks} ranks of {tokens_per_rank} tokens hold; raise the tokens per rank to at least "
        f"{without_offload}"
    )
    if limits is not None and forward is not None:
        with_offload = math.ceil(limits.min_capacity(int(sizes[seq]), without_offload, forward))
        with_offload += -with_offload % tokens_multiple
        text = (
            f"more than {num_ranks} ranks of {tokens_per_rank} tokens hold, {capacities[seq]} with offloading; raise "
            f"the tokens per rank to at least {with_offload} ({without_offload} without offloading)"
        )
    raise ValueError(f"sequence {seq} has {sizes[seq]} tokens, {text}, or cut sequences with a smaller sequence length")


def static_widths(sizes: Ints, cluster: Cluster, width: int, tokens_multiple: int = 1) -> Ints:
    """Return the ranks of each sequence on a static mesh: ``width``, or one per token of a shorter sequence: [n].

    Raises:
        ValueError: ``width`` does not divide the ranks, or a sequence is longer than ``width * C`` tokens.
    """
    num_ranks, tokens_per_rank = cluster.num_ranks, cluster.tokens_per_rank
    if width < 1 or num_ranks % width:
        raise ValueError(f"--static-width {width} does not divide {num_ranks} ranks; choose a divisor of {num_ranks}")
    if (sizes > width * tokens_per_rank).any():
        seq = int((sizes > width * tokens_per_rank).argmax())
        raise ValueError(
            f"sequence {seq} has {sizes[seq]} tokens, more than {width} ranks of {tokens_per_rank} tokens hold; raise "
            f"the width, or the tokens per rank to at least {_min_capacity(int(sizes[seq]), width, tokens_multiple)}"
        )
    return np.minimum(sizes, width)


def _min_capacity(length: int, num_ranks: int, tokens_multiple: int) -> int:
    """Return the smallest C, a multiple of ``tokens_multiple``, with which ``num_ranks`` ranks hold the sequence."""
    share = -(-length // num_ranks)
    return share + -share % tokens_multiple
