"""The values that say where each token of one step is computed (hybrid data parallelism).

A step plan is three nested values::

    StepPlan   ranks[r] -> micro-batches of HDP rank r, in the order in which it runs them
    MicroBatch shards    -> what one forward pass consumes, in memory order
    Shard      ranges    -> token ranges [start, stop) of one sequence, in memory order

A sequence on D ranks is cut in 2D parts; the i-th rank of its ring holds parts i and 2D-1-i, so that
every rank holds the same share of the causal triangle (ByteScale section 7, Fig. 14). For D = 3::

    token   0                                            s
    part    |  0   |  1   |  2   |  3   |  4   |  5   |
    rank      r0     r1     r2     r2     r1     r0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bytescale_ext.plan.table import table_of


@dataclass(frozen=True, slots=True)
class Shard:
    """The tokens of one sequence on one rank.

    Attributes:
        seq: index into ``StepPlan.lengths``.
        ranges: token ranges ``(start, stop)`` of the sequence, ascending, none empty.
        ring: the HDP ranks that share the sequence, in ring order; ``(rank,)`` when it is local.
    """

    seq: int
    ranges: tuple[tuple[int, int], ...]
    ring: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass of one rank consumes: shards laid end to end.

    Shards of rings come first, in the order of their ``seq``, then local sequences.

    Attributes:
        shards: what it holds; empty only in a plan of aligned slots, where it is a micro-batch of padding.
        offload: share of its activations that is kept in host memory until the backward pass, 0 to 1 (ByteScale
            section 5.2, the offload ratio of a micro-batch).
    """

    shards: tuple[Shard, ...]
    offload: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Where every token of one optimizer step is computed.

    Attributes:
        num_ranks: HDP ranks.
        tokens_per_rank: C, the most tokens a micro-batch may hold.
        lengths: tokens of each sequence of the step, in sample order.
        ranks: for each rank, its micro-batches in running order (may be empty, lengths may differ).
        aligned: the micro-batches of a sequence have the same index on every rank of its ring, as pipelines and
            expert parallelism need it; a rank that has nothing for an index has an empty micro-batch there.
    """

    num_ranks: int
    tokens_per_rank: int
    lengths: tuple[int, ...]
    ranks: Sequence[tuple[MicroBatch, ...]]
    aligned: bool = False

    def to_json(self) -> dict[str, Any]:
        """The plan as plain lists and dicts (the format of ``bytescale plan --json``); defaults are left out."""
        return {
            "num_ranks": self.num_ranks,
            "tokens_per_rank": self.tokens_per_rank,
            "lengths": list(self.lengths),
            "ranks": [[_micro_batch_json(micro_batch) for micro_batch in rank] for rank in self.ranks],
            **({"aligned": True} if self.aligned else {}),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> StepPlan:
        """The inverse of ``to_json``."""
        return cls(
            num_ranks=int(value["num_ranks"]),
            tokens_per_rank=int(value["tokens_per_rank"]),
            lengths=tuple(int(length) for length in value["lengths"]),
            ranks=tuple(
                tuple(
                    MicroBatch(
                        tuple(
                            Shard(
                                seq=int(shard["seq"]),
                                ranges=tuple((int(a), int(b)) for a, b in shard["ranges"]),
                                ring=tuple(int(rank) for rank in shard["ring"]),
                            )
                            for shard in micro_batch["shards"]
                        ),
                        float(micro_batch.get("offload", 0.0)),
                    )
                    for micro_batch in rank
                )
                for rank in value["ranks"]
            ),
            aligned=bool(value.get("aligned", False)),
        )

    def digest(self) -> str:
        """sha256 (first 16 hex digits) of the plan's table: equal plans, equal digests, on every machine."""
        return table_of(self.ranks).digest(self.num_ranks, self.tokens_per_rank, self.lengths, self.aligned)


def _micro_batch_json(micro_batch: MicroBatch) -> dict[str, Any]:
    shards = [
        {"seq": shard.seq, "ranges": [list(pair) for pair in shard.ranges], "ring": list(shard.ring)}
        for shard in micro_batch.shards
    ]
    return {"shards": shards, **({"offload": micro_batch.offload} if micro_batch.offload else {})}


def zigzag_ranges(length: int, width: int, index: int) -> tuple[tuple[int, int], ...]:
    """Token ranges of ring member ``index`` of a sequence of ``length`` tokens on ``width`` ranks.

    No padding: shares differ by at most one token, and none exceeds ``ceil(length / width)``. A share of n
    tokens has a front part of ``ceil(n / 2)`` and a back part of ``floor(n / 2)`` tokens. A sequence on one
    rank is one whole range. Empty ranges are left out.
    """
    if width == 1:
        return ((0, length),) if length else ()
    base, extra = divmod(length, width)

    def before(position: int, odd: int) -> int:
        """Tokens of the front parts (odd=1, rounded up) or back parts (odd=0) of members [0, position)."""
        larger = min(position, extra)
        return larger * ((base + 1 + odd) // 2) + (position - larger) * ((base + odd) // 2)

    front = (before(index, 1), before(index + 1, 1))
    back = (length - before(index + 1, 0), length - before(index, 0))
    return tuple((start, stop) for start, stop in (front, back) if stop > start)
