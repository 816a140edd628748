"""The attention of one micro-batch on one rank, as a frozen value: which rows attend to which keys.

The rows ``[0, num_rows)`` of a rank are, in this order::

    ring shard 0      front rows | back rows      one for each sequence shared with other ranks
    ring shard 1      front rows | back rows
    local documents   doc | doc | doc             attention inside each document only
    padding                                       no query sees it; output 0, gradients 0

Shards with the same ring travel together in one *ring pass*: one message holds the keys of all its sequences, and one
kernel call computes all documents of a step. A pass over D ranks computes D blocks on each of them: step t pairs my
queries with the keys that have come to me on their way round the ring (ByteScale section 7, Fig. 14; ``route.py``).
With zigzag shares a block is, for each of its sequences, the causal triangle of my own rows or one full rectangle::

               keys of an earlier member   my own keys    keys of a later member
               front  back                 front  back    front  back
    my front   all    -                    tri    -       -      -
    my back    all    -                    all    tri     all    all

In a slice of a micro-batch (Seq1F1B) the queries belong to the slice. The keys belong to the slice or to its *prefix*:
all slices before it. Rows of keys are counted through the whole micro-batch. Every query of a slice sees the whole
prefix of its document. ``layouts/slices.py`` makes these layouts; without slices there is no prefix and keys have the
rows of the queries. Layers with a sliding window have a layout of their own, in which sequences longer than the window
have no rings (``layouts/window.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from bytescale_ext.attention.layouts.blocks import Interval, PlacedBlock, share_values
from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.attention.layouts.rows import CuSeqlens, Rows
from bytescale_ext.attention.layouts.window import WindowPass, WindowSequence, is_limited, window_pass
from bytescale_ext.errors import PlanError
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges


@dataclass(frozen=True, slots=True)
class KeptKeys:
    """Where a rank keeps the keys of all members of a ring, so that only the keys of the current slice travel.

    Attributes:
        whole: for each member, the rows of its keys up to the end of the slice, among the keys of the micro-batch.
        own: for each member, the rows of its keys in the slice.
        sends_sums: the gradients of the keys of other members travel home with each slice; else they are summed here
            until that slice's own backward pass.
    """

    whole: tuple[Rows, ...]
    own: tuple[Rows, ...]
    sends_sums: bool = False


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """Where a slice of ring sequences finds the keys of earlier slices.

    Attributes:
        tokens: tokens of each sequence before the slice, a multiple of the ring's width.
        keys: rows of my keys, prefix included, among the keys of the micro-batch.
        kept: where the keys of all members are kept, or None when prefixes travel again with each slice.
    """

    tokens: tuple[int, ...]
    keys: Rows
    kept: KeptKeys | None = None


@dataclass(frozen=True, slots=True)
class RingPass:
    """My rows of the sequences that one ring of ranks shares; their keys travel together.

    A member's keys are prefix, front and back of its first sequence, then of the next one.

    Attributes:
        seqs: the sequences (indices into the plan's lengths), ascending.
        route: the members, my place among them and the way of the keys.
        in_micro_batch: rows of my queries in the micro-batch, or in the slice.
        keys: rows of my keys among the keys of the micro-batch.
        rows: for each member, the number of its keys.
        shares: for each member, the number of its queries of each sequence.
        blocks: what I compute at steps 0 .. D-1; block 0 is my own triangles.
        prefix_blocks: what I compute in addition at each step because of prefixes; empty without prefixes.
        kept: see ``PrefixKeys``.
    """

    seqs: tuple[int, ...]
    route: Route
    in_micro_batch: Rows
    keys: Rows
    rows: tuple[int, ...]
    shares: tuple[tuple[int, ...], ...]
    blocks: tuple[PlacedBlock, ...]
    prefix_blocks: tuple[PlacedBlock, ...] = ()
    kept: KeptKeys | None = None

    @property
    def ring(self) -> tuple[int, ...]:
        """HDP ranks in ring order."""
        return self.route.ring

    @property
    def index(self) -> int:
        """My place in ``ring``."""
        return self.route.index

    @property
    def width(self) -> int:
        return self.route.width

    @property
    def num_rows(self) -> int:
        """Rows of my keys."""
        return self.rows[self.index]

    def at(self, step: int) -> tuple[PlacedBlock, ...]:
        """Return what I compute at a step: the blocks that are not empty."""
        return tuple(part[step] for part in (self.blocks, self.prefix_blocks) if part and not part[step].is_empty)

    @property
    def kept_sums(self) -> KeptKeys | None:
        """Where the sums of key gradients of all members are kept, or None."""
        return None if self.kept is None or self.kept.sends_sums else self.kept

    @property
    def sent_keys(self) -> Rows:
        """Rows of my keys among the keys of the micro-batch that travel round the ring."""
        return self.keys if self.kept is None else self.kept.own[self.index]

    def travelling(self, member: int) -> int:
        """Return how many rows of a member's keys travel round the ring."""
        return self.rows[member] if self.kept is None else self.kept.own[member].num_rows

    @property
    def summed_keys(self) -> Rows:
        """Rows of my keys among the keys of the micro-batch whose gradients come home in the slice's backward pass."""
        return self.keys if self.kept_sums is None else self.kept_sums.own[self.index]

    def travelling_sums(self, member: int) -> int:
        """Return of how many rows of a member's keys the gradients travel round the ring."""
        return self.rows[member] if self.kept_sums is None else self.kept_sums.own[member].num_rows

    def source(self, step: int) -> int:
        """Return the place in ``ring`` of the member whose keys are here at a step; see ``Route.source``."""
        return self.route.source(step)


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """The attention of one micro-batch, or of one slice of it, on one rank.

    Attributes:
        num_rows: rows of the query tensor, padding included.
        passes: one for each ring, in the order of their first sequences, which is the same on all ranks.
        local_start: first row of the local documents.
        local: their offsets, counted from ``local_start``.
        local_keys: rows of their keys among the keys of the micro-batch.
        local_prefix: local documents that began in an earlier slice, against their keys in earlier slices, or None.
        local_window: with a window, the one block of all local documents, in place of the others.
        windows: one for each ring some of whose sequences are limited by a window, in the order of their first
            sequences; these run before ``passes``.
    """

    num_rows: int
    passes: tuple[RingPass, ...]
    local_start: int
    local: CuSeqlens
    local_keys: Rows
    local_prefix: PlacedBlock | None = None
    local_window: PlacedBlock | None = None
    windows: tuple[WindowPass, ...] = ()

    @property
    def all_passes(self) -> tuple[WindowPass | RingPass, ...]:
        """The passes in the order in which they run."""
        return (*self.windows, *self.passes)

    @property
    def num_tokens(self) -> int:
        """Rows that are tokens; the rows from here to ``num_rows`` are padding."""
        return self.local_start + self.local.num_tokens

    @property
    def local_blocks(self) -> tuple[PlacedBlock, ...]:
        """The blocks of the local documents: their triangles, then their prefixes."""
        if self.num_tokens == self.local_start:
            return ()
        if self.local_window is not None:
            return (self.local_window,)
        rows = Rows.of([(self.local_start, self.num_tokens)])
        triangles = PlacedBlock(rows, self.local_keys, True, self.local, self.local)
        return (triangles,) if self.local_prefix is None else (triangles, self.local_prefix)


def attention_layout(
    micro_batch: MicroBatch, rank: int, lengths: Sequence[int], num_rows: int, window: int | None = None
) -> AttentionLayout:
    """Return the layout of one micro-batch. Pure; no communication.

    Ring shards are grouped by their ring and its form, and by whether the window limits them, wherever they lie in the
    micro-batch, and the groups of each kind are ordered by their first sequence. All members of a ring find the same
    groups in the same order, each from its own micro-batch. Proof: let sequences X and Y have the same ring and share a
    micro-batch on one of its ranks. X couples the micro-batches that hold X, Y couples the micro-batches that hold Y,
    and the one with both couples them all: they are one coupled group of ``plan/step/check.py``. A rank has at most one
    micro-batch of a group (law 8), so X and Y are together on every member, in one form (law 10). A group of shards is
    thus the same set of sequences on each member. No two groups have the same first sequence, and ranks that run their
    groups in the order of first sequences, those with a window before the others, cannot wait for each other in a
    circle.

    Args:
        micro_batch: ring shards first, in ascending order of ``seq``, then local documents.
        rank: my HDP rank.
        lengths: tokens of each sequence of the step (``StepPlan.lengths``).
        num_rows: rows of the tensors, at least ``micro_batch.num_tokens``; the rest is padding.
        window: the most keys before its own that a token sees; None: all.

    Raises:
        PlanError: the micro-batch breaks the order above, or a share is not the zigzag share of this rank.
        ValueError: the tokens do not fit in ``num_rows``.
    """
    shared = [shard for shard in micro_batch.shards if len(shard.ring) > 1]
    local = micro_batch.shards[len(shared) :]
    _check_shards(micro_batch, shared, local, rank, lengths)
    if micro_batch.num_tokens > num_rows:
        raise ValueError(
            f"a micro-batch of {micro_batch.num_tokens} tokens does not fit in {num_rows} rows; give it more rows"
        )
    groups: dict[tuple[Route, bool], list[int]] = {}
    for shard in shared:
        how = Route(shard.ring, shard.ring.index(rank), shard.inner_rings), is_limited(lengths[shard.seq], window)
        groups.setdefault(how, []).append(shard.seq)
    offsets = CuSeqlens.of_lengths([shard.num_tokens for shard in shared])
    intervals = dict(zip([shard.seq for shard in shared], pairwise(offsets.offsets), strict=True))
    passes: list[RingPass] = []
    windows: list[WindowPass] = []
    for (route, limited), seqs in groups.items():
        rows = Rows.of(intervals[seq] for seq in seqs)
        if limited and window is not None:
            sequences = [WindowSequence(seq, (lengths[seq],), intervals[seq][0]) for seq in seqs]
            windows.append(window_pass(sequences, route, rows, window))
        else:
            passes.append(ring_pass([lengths[seq] for seq in seqs], route, seqs, rows))
    documents = CuSeqlens.of_lengths([shard.num_tokens for shard in local])
    start = offsets.num_tokens
    of_local = [(start + first, start + last) for first, last in pairwise(documents.offsets)]
    in_window = None if window is None else PlacedBlock.in_window(of_local, of_local, window)
    keys = Rows.of([(start, start + documents.num_tokens)])
    return AttentionLayout(num_rows, tuple(passes), start, documents, keys, None, in_window, tuple(windows))


def ring_pass(
    lengths: Sequence[int],
    route: Route,
    seqs: Sequence[int] | None = None,
    in_micro_batch: Rows | None = None,
    prefix: PrefixKeys | None = None,
) -> RingPass:
    """Return the rows and blocks of one member of a ring that shares sequences, or slices of them.

    Args:
        lengths: tokens of each sequence, or of its slice.
        route: the ring and the member.
        seqs: the sequences; by default they are numbered from 0.
        in_micro_batch: rows of its queries in the micro-batch; by default the first ones.
        prefix: the keys before the slice; by default there are none, and the keys have the rows of the queries.
    """
    width, index = route.width, route.index
    before = [0] * len(lengths) if prefix is None else [tokens // width for tokens in prefix.tokens]
    shares = tuple(
        tuple(sum(stop - start for start, stop in zigzag_ranges(length, width, member)) for length in lengths)
        for member in range(width)
    )
    sources = map(route.source, range(width))
    pairs = [_blocks(index, source, shares[index], shares[source], before) for source in sources]
    in_micro_batch = Rows.of([(0, sum(shares[index]))]) if in_micro_batch is None else in_micro_batch
    return RingPass(
        seqs=tuple(range(len(lengths)) if seqs is None else seqs),
        route=route,
        in_micro_batch=in_micro_batch,
        keys=in_micro_batch if prefix is None else prefix.keys,
        rows=tuple(sum(before) + sum(share) for share in shares),
        shares=shares,
        blocks=share_values([block for block, _ in pairs]),
        prefix_blocks=share_values([block for _, block in pairs]) if any(before) else (),
        kept=None if prefix is None else prefix.kept,
    )


def _blocks(
    index: int, source: int, my_share: Sequence[int], share: Sequence[int], before: Sequence[int]
) -> tuple[PlacedBlock, PlacedBlock]:
    """Return what member ``index`` computes with the keys of ``source``, and what it adds because of prefixes.

    Args:
        my_share: my queries of each sequence.
        share: queries of each sequence of the source.
        before: rows of prefix of each sequence, equal on all members.
    """
    mine = list(pairwise(accumulate(my_share, initial=0)))
    fronts = [(start, start + _front(stop - start)) for start, stop in mine]
    backs = [(start + _front(stop - start), stop) for start, stop in mine]
    starts = accumulate((p + n for p, n in zip(before, share, strict=True)), initial=0)
    # For each sequence, in the source's keys: where the prefix begins and ends, and how many rows follow.
    keys = [(start, start + p, n) for start, p, n in zip(starts, before, share, strict=False)]
    prefix: list[Interval] = [(start, begin) for start, begin, _ in keys]
    if source == index:
        own = [(begin, begin + n) for _, begin, n in keys]
        return PlacedBlock.of(mine, own, causal=True, source=source), PlacedBlock.of(mine, prefix, source=source)
    if source < index:
        seen = [(start, begin + _front(n)) for start, begin, n in keys]
        return PlacedBlock.of(mine, seen, source=source), PlacedBlock.of([], [], source=source)
    whole = [(start, begin + n) for start, begin, n in keys]
    return PlacedBlock.of(backs, whole, source=source), PlacedBlock.of(fronts, prefix, source=source)


def _front(num_rows: int) -> int:
    """Return the front rows of a share; the rest are its back."""
    return (num_rows + 1) // 2


def _check_shards(
    micro_batch: MicroBatch, shared: Sequence[Shard], local: Sequence[Shard], rank: int, lengths: Sequence[int]
) -> None:
    """Raise PlanError unless ring shards come first, in order, with the zigzag shares of this rank."""
    if any(len(shard.ring) > 1 for shard in local):
        raise PlanError(f"ring shards must come before local documents on rank {rank}: {_row(micro_batch)}")
    if any(first.seq >= second.seq for first, second in pairwise(shared)):
        raise PlanError(f"ring shards must be in ascending order of seq on rank {rank}: {_row(micro_batch)}")
    for shard in shared:
        if shard.ring.count(rank) != 1 or len(set(shard.ring)) != len(shard.ring):
            raise PlanError(f"rank {rank} must be in the ring once, and no rank twice: {shard}")
        index, length = shard.ring.index(rank), lengths[shard.seq]
        expected = zigzag_ranges(length, len(shard.ring), index)
        if shard.ranges != expected:
            raise PlanError(
                f"sequence {shard.seq} of {length} tokens: member {index} (rank {rank}) of ring {shard.ring} must hold "
                f"{expected}, the plan says {shard.ranges}"
            )
    for shard in local:
        if shard.ring != (rank,) or len(shard.ranges) != 1:
            raise PlanError(f"a local document is one token range on rank {rank}, got {shard}")


def _row(micro_batch: MicroBatch) -> str:
    return ", ".join(f"seq {shard.seq} on {shard.ring}" for shard in micro_batch.shards)
