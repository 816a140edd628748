"""The plan of one step: the rank and micro-batch that compute each token (hybrid data parallelism).

A step plan is three nested values::

    StepPlan   ranks[r]  -> micro-batches of HDP rank r, in running order
    MicroBatch shards    -> input of one forward pass, in memory order
    Shard      ranges    -> token ranges [start, stop) of one sequence, in memory order
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NotRequired, Protocol, TypedDict, cast

import numpy as np

from bytescale_ext.json_input import real, whole
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
from bytescale_ext.plan.step.sizes import Slicing
from bytescale_ext.plan.step.table import table_of


class ShardJson(TypedDict):
    """A shard in the JSON format of a plan."""

    seq: int
    ranges: list[list[int]]
    ring: list[int]
    inner_rings: NotRequired[int]
    shares: NotRequired[list[int]]


class MicroBatchJson(TypedDict):
    """A micro-batch in the JSON format of a plan."""

    shards: list[ShardJson]
    offload: NotRequired[float]


class SlicingJson(TypedDict):
    """The slices of a plan in its JSON format."""

    num_slices: int
    kept_tokens: int
    eager: bool
    summed_tokens: int
    zero_bubble: bool
    swapped_tokens: int


class StepPlanJson(TypedDict):
    """The JSON format of a plan."""

    num_ranks: int
    tokens_per_rank: int
    lengths: list[int]
    ranks: list[list[MicroBatchJson]]
    aligned: NotRequired[bool]
    slicing: NotRequired[SlicingJson]


class Fact[Value](Protocol):
    """A value that follows from a plan.

    Attributes:
        key: name of the value; facts of equal keys have equal values.
    """

    @property
    def key(self) -> Hashable: ...

    def __call__(self, plan: StepPlan) -> Value:
        """Compute the value."""
        ...


@dataclass(frozen=True)
class StepPlan:
    """The rank and micro-batch that compute each token of one optimizer step.

    Attributes:
        num_ranks: HDP ranks.
        tokens_per_rank: C, largest number of tokens of a micro-batch.
        lengths: tokens of each sequence of the step, in sample order: a tuple, or ``Numbers``.
        ranks: micro-batches of each rank in running order; ranks may have different numbers of them, also none.
        aligned: whether the micro-batches of a sequence have the same index on every rank of its ring, as pipelines and
            expert parallelism need; a rank without work at an index has an empty micro-batch there.
        slicing: slicing of the micro-batches of this step; None: the slicing of the run.
    """

    num_ranks: int
    tokens_per_rank: int
    lengths: Sequence[int]
    ranks: Sequence[tuple[MicroBatch, ...]]
    aligned: bool = False
    slicing: Slicing | None = None

    def to_json(self) -> StepPlanJson:
        """Return the plan as plain lists and dicts, the format of ``bytescale plan --json``. Defaults are left out."""
        value: StepPlanJson = {
            "num_ranks": self.num_ranks,
            "tokens_per_rank": self.tokens_per_rank,
            "lengths": list(self.lengths),
            "ranks": [[_micro_batch_json(micro_batch) for micro_batch in rank] for rank in self.ranks],
        }
        if self.aligned:
            value["aligned"] = True
        if self.slicing is not None:
            value["slicing"] = cast(SlicingJson, asdict(self.slicing))
        return value

    @classmethod
    def from_json(cls, value: StepPlanJson) -> StepPlan:
        """Return the plan that ``to_json`` wrote."""
        return cls(
            num_ranks=whole(value["num_ranks"]),
            tokens_per_rank=whole(value["tokens_per_rank"]),
            lengths=tuple(whole(length) for length in value["lengths"]),
            ranks=tuple(
                tuple(
                    MicroBatch(
                        tuple(
                            Shard(
                                seq=whole(shard["seq"]),
                                ranges=tuple((whole(a), whole(b)) for a, b in shard["ranges"]),
                                ring=tuple(whole(rank) for rank in shard["ring"]),
                                inner_rings=whole(shard.get("inner_rings", 1)),
                                shares=tuple(whole(share) for share in shard.get("shares", ())),
                            )
                            for shard in micro_batch["shards"]
                        ),
                        real(micro_batch.get("offload", 0.0)),
                    )
                    for micro_batch in rank
                )
                for rank in value["ranks"]
            ),
            aligned=bool(value.get("aligned", False)),
            slicing=Slicing(**value["slicing"]) if "slicing" in value else None,
        )

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the step on all ranks."""
        return int(np.sum(self.lengths, dtype=np.int64))

    def fact[Value](self, fact: Fact[Value]) -> Value:
        """Return a value that follows from the plan. The plan keeps it, also if it is pickled.

        So the process that makes a plan can compute what would need the table of all ranks elsewhere.
        """
        if fact.key not in self._facts:
            self._facts[fact.key] = fact(self)
        return cast(Value, self._facts[fact.key])

    @cached_property
    def _facts(self) -> dict[Hashable, object]:
        return {}

    def digest(self) -> str:
        """Return the first 16 hex digits of the plan's sha256. Equal plans have equal digests on every machine."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        """The digest, which pickling keeps: a process that received a plan has no table to compute it from."""
        settings = [int(self.aligned)]
        if self.slicing is not None:
            settings += [int(value) for value in asdict(self.slicing).values()]
        return table_of(self.ranks).digest(self.num_ranks, self.tokens_per_rank, self.lengths, settings)


def _micro_batch_json(micro_batch: MicroBatch) -> MicroBatchJson:
    shards = [_shard_json(shard) for shard in micro_batch.shards]
    return {"shards": shards, "offload": micro_batch.offload} if micro_batch.offload else {"shards": shards}


def _shard_json(shard: Shard) -> ShardJson:
    value: ShardJson = {"seq": shard.seq, "ranges": [list(pair) for pair in shard.ranges], "ring": list(shard.ring)}
    if shard.inner_rings != 1:
        value["inner_rings"] = shard.inner_rings
    if shard.shares:
        value["shares"] = list(shard.shares)
    return value
