"""Which rows of a micro-batch attend to which keys, as a frozen value.

The rows ``[0, num_rows)`` of a rank are, in this order::

    ring shard 0      front rows | back rows      one per sequence shared with other ranks
    ring shard 1      front rows | back rows
    local documents   doc | doc | doc             attention inside each document only
    padding                                       attended by nobody; output 0, gradients 0

Attention knows token intervals only. Ring shards with the same ring travel together, in one ring pass: the keys of
all its sequences are one message, and one kernel call takes the documents of one step. A pass over D ranks is D
blocks on each of them: step t pairs my queries with the keys of the member t places before me on their way round the
ring (ByteScale section 7, Fig. 14). Keys travel up over every second rank and back over the others::

    ring of 7 contiguous ranks    0 -> 2 -> 4 -> 6 -> 5 -> 3 -> 1 -> 0

so that a rank exchanges with those at most two places away in rings of any width: at most four peers in a whole
training run, and NCCL keeps buffers for each peer. With zigzag shares a block is, of each of its sequences, the
causal triangle of my own rows or one full rectangle::

               keys of an earlier member   my own keys    keys of a later member
               front  back                 front  back    front  back
    my front   all    -                    tri    -       -      -
    my back    all    -                    all    tri     all    all

Of a slice of a micro-batch (Seq1F1B) the queries are those of the slice, and the keys are its own and those of all
slices before it, its *prefix*, which lie in one buffer of the whole micro-batch. Every query of a slice sees the whole
prefix of its document. ``slice_layout.py`` makes these layouts; without slices there is no prefix, and keys have the
rows of the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bytescale_ext.attention.rows import CuSeqlens, Rows
from bytescale_ext.errors import PlanError
from bytescale_ext.plan.shapes import MicroBatch, Shard, zigzag_ranges


@dataclass(frozen=True, slots=True)
class RingBlock:
    """One step of a ring pass on one rank: rows of mine against keys of one member, document by document.

    A document without a query of mine or without a key of the member is left out on both sides.

    Attributes:
        source: ring index of the member whose keys these are.
        queries: of my rows of the pass.
        keys: of the source's rows of the pass.
        causal: the triangles of my own rows; otherwise every query sees every key of its document.
        cu_q, cu_k: the documents in ``queries`` and ``keys``, as many in both and none empty.
    """

    source: int
    queries: Rows
    keys: Rows
    causal: bool
    cu_q: CuSeqlens
    cu_k: CuSeqlens

    @property
    def is_empty(self) -> bool:
        """No document: nothing to compute, the keys still travel on."""
        return self.cu_q.num_documents == 0


@dataclass(frozen=True, slots=True)
class KeptKeys:
    """Where I keep the keys of a ring's members from slice to slice, so that only a slice's own keys travel.

    Attributes:
        whole: for each member, the rows of its keys up to the end of the slice among those of the micro-batch.
        own: those of the slice.
    """

    whole: tuple[Rows, ...]
    own: tuple[Rows, ...]


@dataclass(frozen=True, slots=True)
class RingPass:
    """My rows of the sequences that one ring of ranks shares; their keys travel together.

    The keys of a member are those of its first sequence, prefix then front then back, then those of the next.

    Attributes:
        seqs: the sequences (indices into the plan's lengths), ascending.
        ring: HDP ranks in ring order.
        index: my place in ``ring``.
        route: places in ``ring`` in the order in which keys travel, the last one followed by the first.
        in_micro_batch: the rows of my queries in the micro-batch, or in the slice.
        keys: the rows of my keys among those of the micro-batch.
        rows: rows of keys of each member, in ring order.
        shares: for each member, its queries of each sequence.
        blocks: what I compute at steps 0 .. D-1; block 0 is my own triangles.
        prefix_blocks: what else I compute at each step, because of prefixes: nothing, or one block.
        kept: where the keys of all members are kept, or None: those of prefixes travel again.
    """

    seqs: tuple[int, ...]
    ring: tuple[int, ...]
    index: int
    route: tuple[int, ...]
    in_micro_batch: Rows
    keys: Rows
    rows: tuple[int, ...]
    shares: tuple[tuple[int, ...], ...]
    blocks: tuple[RingBlock, ...]
    prefix_blocks: tuple[RingBlock, ...] = ()
    kept: KeptKeys | None = None

    @property
    def width(self) -> int:
        return len(self.ring)

    @property
    def num_rows(self) -> int:
        return self.rows[self.index]

    def at(self, step: int) -> tuple[RingBlock, ...]:
        """What I compute at a step; nothing when no document of mine meets these keys."""
        return tuple(part[step] for part in (self.blocks, self.prefix_blocks) if part and not part[step].is_empty)

    @property
    def sent_keys(self) -> Rows:
        """The rows of my keys among those of the micro-batch that go round the ring."""
        return self.keys if self.kept is None else self.kept.own[self.index]

    def travelling(self, member: int) -> int:
        """Rows of keys of a member that go round the ring."""
        return self.rows[member] if self.kept is None else self.kept.own[member].num_rows

    @property
    def next_rank(self) -> int:
        """The HDP rank that gets my keys."""
        return self.ring[self.source(-1)]

    @property
    def previous_rank(self) -> int:
        """The HDP rank whose keys I get."""
        return self.ring[self.source(1)]

    def source(self, step: int) -> int:
        """Place in ``ring`` of the member whose keys are here at a step; after D steps my own are back."""
        return self.route[(self.route.index(self.index) - step) % self.width]


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """The attention of one micro-batch, or of one slice of it, on one rank.

    Attributes:
        num_rows: rows of the query tensor, padding included.
        passes: one for each ring, in the order of their first sequences, which is one order for all ranks.
        local_start: first row of the local documents.
        local: their offsets, counted from ``local_start``.
        local_keys: the rows of their keys among those of the micro-batch.
        local_prefix: of documents that began in an earlier slice, or None; its ``source`` means nothing.
    """

    num_rows: int
    passes: tuple[RingPass, ...]
    local_start: int
    local: CuSeqlens
    local_keys: Rows
    local_prefix: RingBlock | None = None

    @property
    def num_tokens(self) -> int:
        """Rows that are tokens; the rows from here to ``num_rows`` are padding."""
        return self.local_start + self.local.num_tokens


def attention_layout(micro_batch: MicroBatch, rank: int, lengths: Sequence[int], num_rows: int) -> AttentionLayout:
    """The layout of one micro-batch. Pure; no communication.

    Ring shards are grouped by their ring, wherever they lie in the micro-batch, and the groups ordered by their
    first sequence. All members of a ring find the same groups in the same order, each from its own micro-batch.
    Let sequences X and Y have one ring and be together on one of its ranks. X ties the micro-batches that hold it,
    Y those that hold Y, and the one that holds both ties all of them: they are one class of ``plan/check.py``.
    A rank has at most one micro-batch of a class (law 8), so X and Y are together on every member. A group is thus
    the same set of sequences on each of them; its first sequence is a number that no other group has, and ranks
    that run their groups in the order of these numbers cannot wait for each other in a circle.

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
    if any(first.seq >= second.seq for first, second in pairwise(shared)):
        raise PlanError(f"ring shards must be in ascending order of seq on rank {rank}: {_row(micro_batch)}")
    if micro_batch.num_tokens > num_rows:
        raise ValueError(
            f"a micro-batch of {micro_batch.num_tokens} tokens does not fit in {num_rows} rows; give it more rows"
        )
    groups: dict[tuple[int, ...], list[int]] = {}
    intervals: dict[int, tuple[int, int]] = {}
    start = 0
    for shard in shared:
        _check_share(shard, rank, lengths[shard.seq])
        groups.setdefault(shard.ring, []).append(shard.seq)
        intervals[shard.seq] = (start, start + shard.num_tokens)
        start += shard.num_tokens
    passes = tuple(
        ring_pass([lengths[seq] for seq in seqs], ring, ring.index(rank), seqs, Rows.of(intervals[seq] for seq in seqs))
        for ring, seqs in groups.items()
    )
    for shard in local:
        if shard.ring != (rank,) or len(shard.ranges) != 1:
            raise PlanError(f"a local document is one token range on rank {rank}, got {shard}")
    documents = CuSeqlens.of_lengths([shard.num_tokens for shard in local])
    return AttentionLayout(num_rows, passes, start, documents, Rows.of([(start, start + documents.num_tokens)]))


def ring_pass(
    lengths: Sequence[int],
    ring: Sequence[int],
    index: int,
    seqs: Sequence[int] | None = None,
    in_micro_batch: Rows | None = None,
    prefixes: Sequence[int] | None = None,
    keys: Rows | None = None,
    kept: KeptKeys | None = None,
) -> RingPass:
    """The rows and blocks of member ``index`` of a ring that shares sequences, or slices of them, of these lengths.

    Args:
        lengths: tokens of each sequence, or of its slice.
        ring: HDP ranks in ring order.
        index: the member.
        seqs: the sequences; by default they are numbered from 0.
        in_micro_batch: its rows in the micro-batch; by default the first ones.
        prefixes: tokens of each sequence before the slice, a multiple of the ring's width; by default none.
        keys: the rows of its keys, with ``prefixes``; by default those of its queries.
        kept: where it keeps the keys of all members; the member's own are those of ``keys``.
    """
    width = len(ring)
    before = [0] * len(lengths) if prefixes is None else [prefix // width for prefix in prefixes]
    assert prefixes is None or keys is not None, f"{prefixes=} {keys=}"
    shares = tuple(
        tuple(sum(stop - start for start, stop in zigzag_ranges(length, width, member)) for length in lengths)
        for member in range(width)
    )
    route = folded_route(width)
    place = route.index(index)
    sources = [route[(place - step) % width] for step in range(width)]
    pairs = [_blocks(index, source, shares[index], shares[source], before) for source in sources]
    in_micro_batch = Rows.of([(0, sum(shares[index]))]) if in_micro_batch is None else in_micro_batch
    return RingPass(
        seqs=tuple(range(len(lengths)) if seqs is None else seqs),
        ring=tuple(ring),
        index=index,
        route=route,
        in_micro_batch=in_micro_batch,
        keys=in_micro_batch if keys is None else keys,
        rows=tuple(sum(before) + sum(share) for share in shares),
        shares=shares,
        blocks=_sharing_values([block for block, _ in pairs]),
        prefix_blocks=_sharing_values([block for _, block in pairs]) if any(before) else (),
        kept=kept,
    )


def _blocks(
    index: int, source: int, my_share: Sequence[int], share: Sequence[int], before: Sequence[int]
) -> tuple[RingBlock, RingBlock]:
    """What member ``index`` computes with the keys of ``source``, and what else because of prefixes.

    Args:
        my_share, share: queries of each sequence of the two members.
        before: rows of prefix of each sequence, equal on all members.
    """
    mine = list(pairwise(CuSeqlens.of_lengths(my_share).offsets))
    fronts = [(start, start + _front(stop - start)) for start, stop in mine]
    backs = [(start + _front(stop - start), stop) for start, stop in mine]
    starts = CuSeqlens.of_lengths([p + n for p, n in zip(before, share, strict=True)]).offsets[:-1]
    keys = [(start, start + p, n) for start, p, n in zip(starts, before, share, strict=True)]  # prefix from, to; rest
    prefix = [(start, begin) for start, begin, _ in keys]
    if source == index:
        own = [(begin, begin + n) for _, begin, n in keys]
        return block_of(mine, own, causal=True, source=source), block_of(mine, prefix, source=source)
    if source < index:
        seen = [(start, begin + _front(n)) for start, begin, n in keys]
        return block_of(mine, seen, source=source), block_of([], [], source=source)
    whole = [(start, begin + n) for start, begin, n in keys]
    return block_of(backs, whole, source=source), block_of(fronts, prefix, source=source)


def folded_route(width: int) -> tuple[int, ...]:
    """The places of a ring in the order in which keys travel: 0, 2, 4, ... and back over the odd ones to 1."""
    return (*range(0, width, 2), *reversed(range(1, width, 2)))


def _front(num_rows: int) -> int:
    """Front rows of a share of so many; the rest are its back."""
    return (num_rows + 1) // 2


def block_of(
    queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]], causal: bool = False, source: int = 0
) -> RingBlock:
    """The block of these intervals of queries and keys, one pair for each document."""
    documents = [(q, k) for q, k in zip(queries, keys, strict=True) if q[0] < q[1] and k[0] < k[1]]
    return RingBlock(
        source=source,
        queries=Rows.of(q for q, _ in documents),
        keys=Rows.of(k for _, k in documents),
        causal=causal,
        cu_q=CuSeqlens.of_lengths([stop - start for (start, stop), _ in documents]),
        cu_k=CuSeqlens.of_lengths([stop - start for _, (start, stop) in documents]),
    )


def _sharing_values(blocks: Sequence[RingBlock]) -> tuple[RingBlock, ...]:
    """The same blocks, equal rows and offsets of different steps being one value: one copy goes to a device."""
    rows: dict[Rows, Rows] = {}
    offsets: dict[CuSeqlens, CuSeqlens] = {}
    return tuple(
        replace(
            block,
            queries=rows.setdefault(block.queries, block.queries),
            keys=rows.setdefault(block.keys, block.keys),
            cu_q=offsets.setdefault(block.cu_q, block.cu_q),
            cu_k=offsets.setdefault(block.cu_k, block.cu_k),
        )
        for block in blocks
    )


def _check_share(shard: Shard, rank: int, length: int) -> None:
    """Raise PlanError unless the shard is the zigzag share of this rank."""
    if shard.ring.count(rank) != 1 or len(set(shard.ring)) != len(shard.ring):
        raise PlanError(f"rank {rank} must be in the ring once and no rank twice: {shard}")
    index = shard.ring.index(rank)
    expected = zigzag_ranges(length, len(shard.ring), index)
    if shard.ranges != expected:
        raise PlanError(
            f"sequence {shard.seq} of {length} tokens: member {index} (rank {rank}) of ring {shard.ring} must hold "
            f"{expected}, the plan says {shard.ranges}"
        )


def _row(micro_batch: MicroBatch) -> str:
    return ", ".join(f"seq {shard.seq} on {shard.ring}" for shard in micro_batch.shards)
