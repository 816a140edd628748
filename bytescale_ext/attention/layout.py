"""Which rows of a micro-batch attend to which keys, as a frozen value.

The rows ``[0, num_rows)`` of a rank are, in this order::

    ring shard 0      front rows | back rows      one per sequence shared with other ranks
    ring shard 1      front rows | back rows
    local documents   doc | doc | doc             attention inside each document only
    padding                                       attended by nobody; output 0, gradients 0

Attention knows token intervals only. A ring of D ranks is D blocks on each of its ranks: step t pairs my
queries with the keys of ring member ``(index - t) mod D`` (ByteScale section 7, Fig. 14). With zigzag shares a
block is the causal triangle of my own rows or one full rectangle::

               keys of an earlier member   my own keys    keys of a later member
               front  back                 front  back    front  back
    my front   all    -                    tri    -       -      -
    my back    all    -                    all    tri     all    all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.shapes import MicroBatch, Shard, zigzag_ranges


@dataclass(frozen=True, slots=True)
class CuSeqlens:
    """Offsets of documents laid end to end: document i is the rows ``[offsets[i], offsets[i + 1])``.

    Attributes:
        offsets: host integers, starting at 0, not descending.
    """

    offsets: tuple[int, ...]
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        steps = zip(self.offsets, self.offsets[1:], strict=False)
        if not self.offsets or self.offsets[0] != 0 or any(stop < start for start, stop in steps):
            raise ValueError(f"offsets must start at 0 and not descend, got {self.offsets}")

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> CuSeqlens:
        """The offsets of documents of these lengths."""
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        return cls(tuple(offsets))

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return self.offsets[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.offsets, self.offsets[1:], strict=False))

    @property
    def longest(self) -> int:
        """Tokens of the longest document (0 when there is none)."""
        return max(self.lengths, default=0)

    def on(self, device: torch.device) -> torch.Tensor:
        """The offsets as int32 ``[num_documents + 1]`` on a device; copied on the first call, without a sync."""
        tensor = self._on_device.get(device)
        if tensor is None:
            host = torch.tensor(self.offsets, dtype=torch.int32, pin_memory=device.type == "cuda")
            tensor = host.to(device, non_blocking=True)
            self._on_device[device] = tensor
        return tensor


@dataclass(frozen=True, slots=True)
class RingBlock:
    """One step of a ring on one rank: an interval of my query rows against the first keys of one member.

    Attributes:
        source: ring index of the member whose keys these are.
        query_start, query_stop: rows of my shard (0 is the shard's first row).
        num_keys: the first ``num_keys`` rows of the source's share are attended.
        causal: the triangle of my own rows; otherwise every query sees every key.
        cu_q, cu_k: the same intervals as one-document offsets for a varlen kernel.
    """

    source: int
    query_start: int
    query_stop: int
    num_keys: int
    causal: bool
    cu_q: CuSeqlens
    cu_k: CuSeqlens

    @property
    def is_empty(self) -> bool:
        """No query or no key: nothing to compute, the keys still travel on."""
        return self.query_stop == self.query_start or self.num_keys == 0


@dataclass(frozen=True, slots=True)
class RingShard:
    """My rows of one sequence that a ring of ranks shares.

    Attributes:
        seq: the sequence (index into the plan's lengths).
        start: first row in the micro-batch.
        ring: HDP ranks in ring order.
        index: my place in ``ring``.
        rows: rows of each member, in ring order.
        fronts: front rows of each member; the back has ``rows - fronts``.
        blocks: what I compute at steps 0 .. D-1; block 0 is my own triangle.
    """

    seq: int
    start: int
    ring: tuple[int, ...]
    index: int
    rows: tuple[int, ...]
    fronts: tuple[int, ...]
    blocks: tuple[RingBlock, ...]

    @property
    def width(self) -> int:
        return len(self.ring)

    @property
    def num_rows(self) -> int:
        return self.rows[self.index]

    @property
    def next_rank(self) -> int:
        """The HDP rank that gets my keys."""
        return self.ring[(self.index + 1) % self.width]

    @property
    def previous_rank(self) -> int:
        """The HDP rank whose keys I get."""
        return self.ring[self.index - 1]


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """The attention of one micro-batch on one rank.

    Attributes:
        num_rows: rows of the query, key and value tensors, padding included.
        rings: shards of shared sequences, in the order in which every rank meets them.
        local_start: first row of the local documents.
        local: their offsets, counted from ``local_start``.
    """

    num_rows: int
    rings: tuple[RingShard, ...]
    local_start: int
    local: CuSeqlens

    @property
    def num_tokens(self) -> int:
        """Rows that are tokens; the rows from here to ``num_rows`` are padding."""
        return self.local_start + self.local.num_tokens


def attention_layout(micro_batch: MicroBatch, rank: int, lengths: Sequence[int], num_rows: int) -> AttentionLayout:
    """The layout of one micro-batch. Pure; no communication.

    Args:
        micro_batch: ring shards first, in ascending order of ``seq``, then local documents.
        rank: my HDP rank.
        lengths: tokens of each sequence of the step (``StepPlan.lengths``).
        num_rows: rows of the tensors, at least ``micro_batch.num_tokens``; the rest is padding.

    Raises:
        PlanError: the micro-batch breaks the order above, or a share is not the zigzag share of this rank.
        ValueError: the tokens do not fit in ``num_rows``.
    """
    shared = [shard for shard in micro_batch.shards if len(shard.ring) > 1]
    local = micro_batch.shards[len(shared) :]
    if any(len(shard.ring) > 1 for shard in local):
        raise PlanError(f"ring shards must come before local documents on rank {rank}: {_row(micro_batch)}")
    if any(first.seq >= second.seq for first, second in zip(shared, shared[1:], strict=False)):
        raise PlanError(f"ring shards must be in ascending order of seq on rank {rank}: {_row(micro_batch)}")
    if micro_batch.num_tokens > num_rows:
        raise ValueError(
            f"a micro-batch of {micro_batch.num_tokens} tokens does not fit in {num_rows} rows; give it more rows"
        )
    rings, start = [], 0
    for shard in shared:
        rings.append(_ring_shard(shard, rank, lengths[shard.seq], start))
        start += shard.num_tokens
    for shard in local:
        if shard.ring != (rank,) or len(shard.ranges) != 1:
            raise PlanError(f"a local document is one token range on rank {rank}, got {shard}")
    documents = CuSeqlens.of_lengths([shard.num_tokens for shard in local])
    return AttentionLayout(num_rows=num_rows, rings=tuple(rings), local_start=start, local=documents)


def ring_shard(seq: int, length: int, ring: Sequence[int], index: int, start: int = 0) -> RingShard:
    """The rows and blocks of member ``index`` of the ring of a sequence of ``length`` tokens.

    Args:
        seq: the sequence, for messages.
        length: its tokens.
        ring: HDP ranks in ring order.
        index: the member.
        start: its first row in the micro-batch.
    """
    width = len(ring)
    shares = [zigzag_ranges(length, width, member) for member in range(width)]
    rows = tuple(sum(stop - begin for begin, stop in share) for share in shares)
    fronts = tuple((count + 1) // 2 for count in rows)
    blocks = tuple(_block(index, (index - step) % width, rows, fronts) for step in range(width))
    return RingShard(seq, start, tuple(ring), index, rows, fronts, blocks)


def _ring_shard(shard: Shard, rank: int, length: int, start: int) -> RingShard:
    if shard.ring.count(rank) != 1 or len(set(shard.ring)) != len(shard.ring):
        raise PlanError(f"rank {rank} must be in the ring once and no rank twice: {shard}")
    index = shard.ring.index(rank)
    expected = zigzag_ranges(length, len(shard.ring), index)
    if shard.ranges != expected:
        raise PlanError(
            f"sequence {shard.seq} of {length} tokens: member {index} (rank {rank}) of ring {shard.ring} must hold "
            f"{expected}, the plan says {shard.ranges}"
        )
    return ring_shard(shard.seq, length, shard.ring, index, start)


def _block(index: int, source: int, rows: tuple[int, ...], fronts: tuple[int, ...]) -> RingBlock:
    mine = rows[index]
    if source == index:
        query_start, num_keys = 0, mine
    elif source < index:
        query_start, num_keys = 0, fronts[source]
    else:
        query_start, num_keys = fronts[index], rows[source]
    return RingBlock(
        source=source,
        query_start=query_start,
        query_stop=mine,
        num_keys=num_keys,
        causal=source == index,
        cu_q=CuSeqlens((0, mine - query_start)),
        cu_k=CuSeqlens((0, num_keys)),
    )


def _row(micro_batch: MicroBatch) -> str:
    return ", ".join(f"seq {shard.seq} on {shard.ring}" for shard in micro_batch.shards)
