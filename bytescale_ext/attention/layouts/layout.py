"""The attention layout of one micro-batch on one rank: a frozen value that maps query rows to key rows.

The rows ``[0, num_rows)`` of a rank are, in this order::

    ring shard 0      front rows | back rows      one shard per sequence that the rank shares with other ranks
    ring shard 1      front rows | back rows
    local documents   doc | doc | doc             attention inside each document only
    padding                                       no query sees it; output 0, gradients 0

The shards with the same ring form a *ring pass*: a message holds the keys of all its sequences, and a kernel call
computes all documents of a hop. A pass over D ranks has D blocks on each rank. Block t pairs the rank's queries with
the keys that are on the rank at hop t (ByteScale section 7, Fig. 14; ``route.py``). With zigzag shares a block is, for
each of its sequences, the causal triangle of the rank's own rows or one full rectangle::

               keys of an earlier member   my own keys    keys of a later member
               front  back                 front  back    front  back
    my front   all    -                    tri    -       -      -
    my back    all    -                    all    tri     all    all

In a slice of a micro-batch (Seq1F1B) the queries belong to the slice. The keys belong to the slice or to its *prefix*,
that is, to all earlier slices. Rows of keys are numbered through the whole micro-batch. Every query of a slice sees the
whole prefix of its document. ``layouts/slices.py`` makes the layouts of slices. Without slices there is no prefix, and
keys have the same rows as queries. Layers with a sliding window have a separate layout, where sequences longer than the
window have no rings (``layouts/window.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from bytescale_ext.attention.layouts.blocks import Interval, PlacedBlock, share_values
from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.attention.layouts.rows import CuSeqlens, Rows
from bytescale_ext.attention.layouts.window import WindowPass, WindowSequence, is_limited, window_pass
from bytescale_ext.errors import PlanError
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges


@dataclass(frozen=True, slots=True)
class KeptKeys:
    """Rows of the kept keys of all members of a ring. Only the keys of the current slice travel.

    Attributes:
        whole: rows of each member's keys up to the end of the slice, among the keys of the micro-batch.
        own: rows of each member's keys in the slice.
        sends_sums: whether the gradients of other members' keys return to them with each slice. Otherwise they are
            summed on this rank until the backward pass of the keys' slice.
    """

    whole: tuple[Rows, ...]
    own: tuple[Rows, ...]
    sends_sums: bool = False


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """The prefix of a slice of ring sequences.

    Attributes:
        tokens: number of tokens of each sequence before the slice, a multiple of the ring's width.
        keys: rows of this rank's keys, including the prefix, among the keys of the micro-batch.
        kept: rows of the kept keys of all members; None if prefixes travel again with each slice.
    """

    tokens: tuple[int, ...]
    keys: Rows
    kept: KeptKeys | None = None


@dataclass(frozen=True, slots=True)
class RingPass:
    """A rank's rows and blocks of the sequences of a ring, whose keys travel together.

    The keys of a member are prefix, front and back of its first sequence, then of its next sequence.

    Attributes:
        seqs: indices of the sequences in the plan's lengths, ascending.
        route: route of the keys round the ring.
        in_micro_batch: rows of this rank's queries in the micro-batch or slice.
        keys: rows of this rank's keys among the keys of the micro-batch.
        rows: number of keys of each member, including the prefix.
        shares: number of queries of each member, by sequence.
        blocks: block of each hop 0 .. D-1; block 0 has the triangles of this rank's own rows.
        prefix_blocks: additional block of each hop over prefixes, or over the tokens that a group shares
            (``parts.py``); empty without either.
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
        """Index of this rank in ``ring``."""
        return self.route.index

    @property
    def width(self) -> int:
        return self.route.width

    @property
    def num_rows(self) -> int:
        """Number of this rank's keys."""
        return self.rows[self.index]

    def at(self, hop: int) -> tuple[PlacedBlock, ...]:
        """Return the non-empty blocks of a hop."""
        return tuple(part[hop] for part in (self.blocks, self.prefix_blocks) if part and not part[hop].is_empty)

    @property
    def kept_sums(self) -> KeptKeys | None:
        """Rows of the kept sums of key gradients of all members, or None."""
        return None if self.kept is None or self.kept.sends_sums else self.kept

    @property
    def sent_keys(self) -> Rows:
        """Rows of this rank's travelling keys among the keys of the micro-batch."""
        return self.keys if self.kept is None else self.kept.own[self.index]

    def travelling(self, member: int) -> int:
        """Return the number of a member's keys that travel round the ring."""
        return self.rows[member] if self.kept is None else self.kept.own[member].num_rows

    @property
    def summed_keys(self) -> Rows:
        """Rows of this rank's keys that receive gradients from other members in the backward pass of the slice."""
        return self.keys if self.kept_sums is None else self.kept_sums.own[self.index]

    def travelling_sums(self, member: int) -> int:
        """Return the number of a member's keys with gradients that travel round the ring."""
        return self.rows[member] if self.kept_sums is None else self.kept_sums.own[member].num_rows

    def source(self, hop: int) -> int:
        """Return the index in ``ring`` of the member whose keys are here at a hop; see ``Route.source``."""
        return self.route.source(hop)


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """The attention of a micro-batch, or of a slice of it, on one rank.

    Attributes:
        num_rows: rows of the query tensor, including padding.
        passes: ring passes in the order of their first sequences, which is the same on all ranks.
        local_start: first row of the local documents.
        local: offsets of the local documents, counted from ``local_start``.
        local_keys: rows of the local documents' keys among the keys of the micro-batch.
        local_prefix: block of the local documents that began in an earlier slice, over their keys in earlier slices;
            None without such documents.
        local_shared: block of documents of groups over the tokens that the group shares (``parts.py``); None without.
        local_window: the only block of all local documents in a layout with a window; else None.
        windows: passes of the sequences that a window limits, in the order of their first sequences. They run before
            ``passes``.
        local_blocks: blocks of the local documents: their triangles, then their prefixes and shared tokens.
        all_passes: all passes in execution order.
    """

    num_rows: int
    passes: tuple[RingPass, ...]
    local_start: int
    local: CuSeqlens
    local_keys: Rows
    local_prefix: PlacedBlock | None = None
    local_window: PlacedBlock | None = None
    windows: tuple[WindowPass, ...] = ()
    local_shared: PlacedBlock | None = None
    local_blocks: tuple[PlacedBlock, ...] = field(init=False, compare=False, repr=False)
    all_passes: tuple[WindowPass | RingPass, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Stored, because every layer reads them.
        object.__setattr__(self, "local_blocks", self._local_blocks())
        object.__setattr__(self, "all_passes", (*self.windows, *self.passes))

    @property
    def num_tokens(self) -> int:
        """Number of tokens; the rows from here to ``num_rows`` are padding."""
        return self.local_start + self.local.num_tokens

    @property
    def whole_block(self) -> PlacedBlock | None:
        """The only block, if its queries are all rows, in order; None for several blocks, rings or padding."""
        if self.all_passes or len(self.local_blocks) != 1:
            return None
        block = self.local_blocks[0]
        return block if block.causal and block.queries.intervals == ((0, self.num_rows),) else None

    @property
    def whole_pass(self) -> RingPass | None:
        """The only pass, if its queries are all rows, in order; None for local documents, several passes or padding."""
        if self.local_blocks or self.windows or len(self.passes) != 1:
            return None
        ring_pass = self.passes[0]
        return ring_pass if ring_pass.in_micro_batch.intervals == ((0, self.num_rows),) else None

    def _local_blocks(self) -> tuple[PlacedBlock, ...]:
        """Return ``local_blocks``."""
        if self.num_tokens == self.local_start:
            return ()
        if self.local_window is not None:
            return (self.local_window,)
        rows = Rows.of([(self.local_start, self.num_tokens)])
        triangles = PlacedBlock(rows, self.local_keys, True, self.local, self.local)
        return tuple(block for block in (triangles, self.local_prefix, self.local_shared) if block is not None)


def attention_layout(
    micro_batch: MicroBatch, rank: int, lengths: Sequence[int], num_rows: int, window: int | None = None
) -> AttentionLayout:
    """Return the layout of a micro-batch. Pure; no communication.

    Ring shards are grouped by their ring, by its form, and by whether the window limits them. Groups are ordered by
    their first sequence, with limited groups first. All members of a ring derive the same groups in the same order,
    each from its own micro-batch. Proof: let sequences X and Y have the same ring and share a micro-batch on one of its
    ranks. X couples all micro-batches with X, Y couples all micro-batches with Y, and the micro-batch with both couples
    them all. So they are one coupled group of ``plan/step/check.py``. A rank has at most one micro-batch of a coupled
    group (law 8), so X and Y are in the same micro-batch on every member, and have the same form (law 10). A group of
    shards is thus the same set of sequences on each member. No two groups have the same first sequence. So ranks that
    run their groups in this order cannot wait for each other in a cycle.

    Args:
        micro_batch: micro-batch with ring shards first, in ascending order of ``seq``, then local documents.
        rank: HDP rank.
        lengths: number of tokens of each sequence of the step (``StepPlan.lengths``).
        num_rows: rows of the tensors, at least ``micro_batch.num_tokens``; further rows are padding.
        window: the most keys before its own key that a token sees; None for all.

    Raises:
        PlanError: the shards are not in this order, or a share is not the rank's zigzag share.
        ValueError: the micro-batch has more than ``num_rows`` tokens.
    """
    shared = [shard for shard in micro_batch.shards if len(shard.ring) > 1]
    local = micro_batch.shards[len(shared) :]
    _check_shards(micro_batch, shared, local, rank, lengths)
    if micro_batch.num_tokens > num_rows:
        raise ValueError(
            f"a micro-batch of {micro_batch.num_tokens} tokens does not fit in {num_rows} rows; give it more rows"
        )
    groups: dict[tuple[Route, bool], list[int]] = {}
    shares = {shard.seq: shard.shares for shard in shared}
    for shard in shared:
        route = Route(shard.ring, shard.ring.index(rank), shard.inner_rings)
        groups.setdefault((route, is_limited(lengths[shard.seq], window)), []).append(shard.seq)
        if shard.shares and is_limited(lengths[shard.seq], window):
            raise PlanError(f"sequence {shard.seq} has uneven shares, which attention windows cannot have")
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
            of_seqs = [shares[seq] for seq in seqs]
            passes.append(ring_pass([lengths[seq] for seq in seqs], route, seqs, rows, uneven=of_seqs))
    documents = CuSeqlens.of_lengths([shard.num_tokens for shard in local])
    start = offsets.num_tokens
    rows_of_local = [(start + first, start + last) for first, last in pairwise(documents.offsets)]
    local_window = None if window is None else PlacedBlock.in_window(rows_of_local, rows_of_local, window)
    keys = Rows.of([(start, start + documents.num_tokens)])
    return AttentionLayout(num_rows, tuple(passes), start, documents, keys, None, local_window, tuple(windows))


def ring_pass(
    lengths: Sequence[int],
    route: Route,
    seqs: Sequence[int] | None = None,
    in_micro_batch: Rows | None = None,
    prefix: PrefixKeys | None = None,
    uneven: Sequence[tuple[int, ...]] = (),
) -> RingPass:
    """Return the ring pass of one member of a ring.

    Args:
        lengths: number of tokens of each sequence, or of its slice.
        route: ring and member.
        seqs: indices of the sequences; by default they are numbered from 0.
        in_micro_batch: rows of the member's queries in the micro-batch; by default the first rows.
        prefix: keys before the slice; by default there are none, and the keys have the rows of the queries.
        uneven: queries of each member, by sequence; empty for even shares, which all sequences have by default.
    """
    width, index = route.width, route.index
    before = [0] * len(lengths) if prefix is None else [tokens // width for tokens in prefix.tokens]
    given = uneven or [()] * len(lengths)
    of_seqs = [own or even_shares(length, width) for own, length in zip(given, lengths, strict=True)]
    shares = tuple(zip(*of_seqs, strict=True))
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


def zigzag_share(num_tokens: int, width: int, member: int) -> int:
    """Return the number of tokens in the zigzag share of a member of a ring of ``width`` ranks."""
    return sum(stop - start for start, stop in zigzag_ranges(num_tokens, width, member))


def even_shares(num_tokens: int, width: int) -> tuple[int, ...]:
    """Return the number of tokens of each member of a ring of ``width`` ranks."""
    return tuple(zigzag_share(num_tokens, width, member) for member in range(width))


def _blocks(
    index: int, source: int, query_share: Sequence[int], key_share: Sequence[int], before: Sequence[int]
) -> tuple[PlacedBlock, PlacedBlock]:
    """Return the block and the prefix block that member ``index`` computes with the keys of ``source``.

    Args:
        index: index of the member with the queries.
        source: index of the member with the keys.
        query_share: number of tokens of ``index``, by sequence.
        key_share: number of tokens of ``source``, by sequence.
        before: number of prefix rows of each sequence, equal on all members.
    """
    queries = list(pairwise(accumulate(query_share, initial=0)))
    fronts = [(start, start + _front(stop - start)) for start, stop in queries]
    backs = [(start + _front(stop - start), stop) for start, stop in queries]
    starts = accumulate((p + n for p, n in zip(before, key_share, strict=True)), initial=0)
    # For each sequence, in the keys of the source: start and end of the prefix, number of rows after the prefix.
    keys = [(start, start + p, n) for start, p, n in zip(starts, before, key_share, strict=False)]
    prefix: list[Interval] = [(start, begin) for start, begin, _ in keys]
    if source == index:
        own = [(begin, begin + n) for _, begin, n in keys]
        return PlacedBlock.of(queries, own, causal=True, source=source), PlacedBlock.of(queries, prefix, source=source)
    if source < index:
        up_to_front = [(start, begin + _front(n)) for start, begin, n in keys]
        return PlacedBlock.of(queries, up_to_front, source=source), PlacedBlock.of([], [], source=source)
    whole = [(start, begin + n) for start, begin, n in keys]
    return PlacedBlock.of(backs, whole, source=source), PlacedBlock.of(fronts, prefix, source=source)


def _front(num_rows: int) -> int:
    """Return the number of front rows of a share; the other rows are its back."""
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
        expected = shard.member_ranges(length, index)
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
