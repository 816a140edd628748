"""The independent validator of step plans: it knows the laws and nothing of how a plan is made."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.shapes import Shard, StepPlan
from bytescale_ext.plan.show import plan_line, plan_table, ring_text

_MAX_ROWS = 40
_Ints = npt.NDArray[np.int64]


def check_step_plan(plan: StepPlan, lengths: Sequence[int] | None = None, tokens_multiple: int = 1) -> None:
    """Raise PlanError unless the plan keeps every law.

    1. One list of micro-batches per rank; lengths are positive (and equal ``lengths`` when given); C is positive.
    2. No micro-batch and no shard is empty; ranges lie in their sequence, ascend and do not overlap.
    3. Every token of every sequence is computed exactly once.
    4. All shards of a sequence name the same ring: contiguous ascending ranks, each of which holds one shard.
    5. A ring member holds parts i and 2D-1-i of the sequence, shares differ by at most one token (ByteScale
       section 7, Fig. 14); a sequence on one rank is one range.
    6. No micro-batch exceeds C tokens after padding at its end to a multiple of ``tokens_multiple``.
    7. In a micro-batch ring shards come first, ordered by sequence, then local ones.
    8. One global order: micro-batches that share a ring sequence run together (a class); a rank has at most one of
       a class, and the running orders of all ranks agree, so that no rank waits for ever.

    The message holds the law, the printed plan (at most about 40 rows) and ``>>`` before each bad row.
    """
    _check_shape(plan, lengths, tokens_multiple)
    flat = _flatten(plan)
    _check_ranges(plan, flat)
    _check_coverage(plan, flat)
    _check_rings(plan, flat)
    _check_shares(plan, flat)
    _check_capacity(plan, flat, tokens_multiple)
    _check_memory_order(plan, flat)
    _check_global_order(plan)


def ring_classes(plan: StepPlan) -> list[list[int]]:
    """For each rank and micro-batch its class: micro-batches that share ring sequences, directly or through others.

    They must run at the same time. Classes are numbered by first appearance, rank by rank.
    """
    parents: list[int] = []

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    first_of_seq: dict[int, int] = {}
    for micro_batch in (micro_batch for rank in plan.ranks for micro_batch in rank):
        node = len(parents)
        parents.append(node)
        for shard in micro_batch.shards:
            if len(shard.ring) > 1:
                other = first_of_seq.setdefault(shard.seq, node)
                parents[root(node)] = root(other)
    numbers: dict[int, int] = {}
    nodes = iter(range(len(parents)))
    return [[numbers.setdefault(root(next(nodes)), len(numbers)) for _ in rank] for rank in plan.ranks]


@dataclass(frozen=True, slots=True)
class _Flat:
    """A plan as parallel arrays: micro-batches -> (rank, index), shards -> micro-batch, ranges -> shard."""

    rows: list[tuple[int, int]]
    rings: list[tuple[int, ...]]
    shard_row: _Ints
    shard_seq: _Ints
    shard_width: _Ints
    shard_tokens: _Ints
    shard_first_range: _Ints
    range_shard: _Ints
    range_start: _Ints
    range_stop: _Ints

    def where(self, shard: int) -> tuple[int, int]:
        """(rank, micro-batch) of a shard."""
        return self.rows[int(self.shard_row[shard])]


def _fail(plan: StepPlan, law: str, marked: Collection[tuple[int, int]] = ()) -> NoReturn:
    """Raise PlanError: the law, the table with the bad rows marked, a summary. A law of no row is marked itself."""
    heading = law if marked else f">> {law}"
    raise PlanError(f"{heading}\n{plan_table(plan, marked, max_rows=_MAX_ROWS)}\n{plan_line(plan)}")


def _check_shape(plan: StepPlan, lengths: Sequence[int] | None, tokens_multiple: int) -> None:
    if plan.num_ranks < 1 or len(plan.ranks) != plan.num_ranks:
        _fail(plan, f"the plan is for {plan.num_ranks} ranks and lists micro-batches of {len(plan.ranks)}")
    if plan.tokens_per_rank < 1 or tokens_multiple < 1 or plan.tokens_per_rank % tokens_multiple:
        _fail(plan, f"C = {plan.tokens_per_rank} tokens per rank is no positive multiple of {tokens_multiple}")
    for seq, length in enumerate(plan.lengths):
        if length < 1:
            _fail(plan, f"seq {seq} has {length} tokens; a sequence needs at least 1")
    if lengths is None:
        return
    if len(lengths) != len(plan.lengths):
        _fail(plan, f"the plan has {len(plan.lengths)} sequences, the step has {len(lengths)}")
    for seq, (planned, given) in enumerate(zip(plan.lengths, lengths, strict=True)):
        if planned != given:
            _fail(plan, f"seq {seq} has {planned} tokens in the plan and {given} in the step")


def _flatten(plan: StepPlan) -> _Flat:
    """Flatten the plan; empty micro-batches and shards and unknown sequences are refused on the way."""
    rows = [(rank, index) for rank, micro_batches in enumerate(plan.ranks) for index in range(len(micro_batches))]
    shards: list[Shard] = []
    shard_row: list[int] = []
    for number, (rank, index) in enumerate(rows):
        held = plan.ranks[rank][index].shards
        if not held:
            _fail(plan, f"rank {rank} micro-batch {index} is empty", [(rank, index)])
        shards.extend(held)
        shard_row.extend([number] * len(held))
    for number, shard in enumerate(shards):
        if not 0 <= shard.seq < len(plan.lengths):
            _fail(plan, f"seq {shard.seq} does not exist, the step has {len(plan.lengths)}", [rows[shard_row[number]]])
        if not shard.ranges or not shard.ring:
            what = "ring" if shard.ranges else "token range"
            _fail(plan, f"a shard of seq {shard.seq} has no {what}", [rows[shard_row[number]]])
    counts = _ints([len(shard.ranges) for shard in shards])
    bounds = _ints([pair for shard in shards for pair in shard.ranges]).reshape(-1, 2)
    first_range = np.cumsum(counts) - counts
    tokens = np.add.reduceat(bounds[:, 1] - bounds[:, 0], first_range) if shards else _ints([])
    return _Flat(
        rows=rows,
        rings=[shard.ring for shard in shards],
        shard_row=_ints(shard_row),
        shard_seq=_ints([shard.seq for shard in shards]),
        shard_width=_ints([len(shard.ring) for shard in shards]),
        shard_tokens=tokens,
        shard_first_range=first_range,
        range_shard=np.repeat(np.arange(len(shards)), counts),
        range_start=bounds[:, 0],
        range_stop=bounds[:, 1],
    )


def _ints(values: Sequence[int] | Sequence[tuple[int, int]]) -> _Ints:
    return np.array(values, dtype=np.int64)


def _first(mask: npt.NDArray[np.bool_]) -> int | None:
    """Index of the first True, or None."""
    index = int(np.argmax(mask)) if mask.size else 0
    return index if mask.size and mask[index] else None


def _check_ranges(plan: StepPlan, flat: _Flat) -> None:
    lengths = _ints(plan.lengths)
    stops = lengths[flat.shard_seq[flat.range_shard]]
    bad = _first((flat.range_start < 0) | (flat.range_start >= flat.range_stop) | (flat.range_stop > stops))
    if bad is not None:
        shard = int(flat.range_shard[bad])
        seq = int(flat.shard_seq[shard])
        text = f"[{flat.range_start[bad]}:{flat.range_stop[bad]}]"
        _fail(plan, f"range {text} of seq {seq} is empty or outside [0:{plan.lengths[seq]}]", [flat.where(shard)])
    same_shard = flat.range_shard[1:] == flat.range_shard[:-1]
    bad = _first(same_shard & (flat.range_start[1:] < flat.range_stop[:-1]))
    if bad is not None:
        shard = int(flat.range_shard[bad])
        _fail(plan, f"ranges of a shard of seq {flat.shard_seq[shard]} overlap or descend", [flat.where(shard)])


def _check_coverage(plan: StepPlan, flat: _Flat) -> None:
    """Each sequence's ranges, sorted, must be laid end to end from 0 to its length."""
    seqs = flat.shard_seq[flat.range_shard]
    order = np.lexsort((flat.range_start, seqs))
    seqs, starts, stops = seqs[order], flat.range_start[order], flat.range_stop[order]
    shards = flat.range_shard[order]
    missing = np.flatnonzero(np.bincount(seqs, minlength=len(plan.lengths)) == 0)
    if missing.size:
        _fail(plan, f"seq {missing[0]} of {plan.lengths[missing[0]]} tokens is on no rank")
    is_first = np.append(True, seqs[1:] != seqs[:-1])[: len(seqs)]
    expected = np.where(is_first, 0, np.append(0, stops[:-1])[: len(seqs)])
    bad = _first(starts != expected)
    if bad is not None:
        seq, start, covered = int(seqs[bad]), int(starts[bad]), int(expected[bad])
        if start > covered:
            _fail(plan, f"tokens [{covered}:{start}] of seq {seq} are on no rank", [flat.where(int(shards[bad]))])
        pair = {flat.where(int(shards[bad])), flat.where(int(shards[bad - 1]))}
        _fail(plan, f"tokens [{start}:{min(covered, int(stops[bad]))}] of seq {seq} are computed twice", pair)
    is_last = np.append(is_first[1:], True)[: len(seqs)]
    bad = _first(is_last & (stops != _ints(plan.lengths)[seqs]))
    if bad is not None:
        seq = int(seqs[bad])
        text = f"tokens [{stops[bad]}:{plan.lengths[seq]}] of seq {seq} are on no rank"
        _fail(plan, text, [flat.where(int(shards[bad]))])


def _check_rings(plan: StepPlan, flat: _Flat) -> None:
    ring_of: dict[int, tuple[int, ...]] = {}
    holders: dict[int, set[int]] = {}
    for shard, (seq, ring) in enumerate(zip(flat.shard_seq.tolist(), flat.rings, strict=True)):
        rank = flat.where(shard)[0]
        if seq not in ring_of:
            ring_of[seq], holders[seq] = ring, set()
            contiguous = ring == tuple(range(ring[0], ring[0] + len(ring)))
            if not contiguous or ring[0] < 0 or ring[-1] >= plan.num_ranks:
                text = f"ring {ring_text(ring)} of seq {seq} is not a run of contiguous ascending ranks"
                _fail(plan, f"{text} in 0-{plan.num_ranks - 1}", [flat.where(shard)])
        elif ring != ring_of[seq]:
            law = f"rank {rank} has ring {ring_text(ring)} for seq {seq}, others have ring {ring_text(ring_of[seq])}"
            _fail(plan, law, [flat.where(shard)])
        if not ring[0] <= rank <= ring[-1]:
            _fail(plan, f"rank {rank} holds seq {seq} and is not in its ring {ring_text(ring)}", [flat.where(shard)])
        if rank in holders[seq]:
            _fail(plan, f"rank {rank} holds two shards of seq {seq}", [flat.where(shard)])
        holders[seq].add(rank)
    for seq, ring in ring_of.items():
        if len(holders[seq]) != len(ring):
            absent = min(set(ring) - holders[seq])
            rows = {flat.where(int(shard)) for shard in np.flatnonzero(flat.shard_seq == seq)}
            _fail(plan, f"rank {absent} is in ring {ring_text(ring)} of seq {seq} and holds no shard of it", rows)


def _check_shares(plan: StepPlan, flat: _Flat) -> None:
    """The zigzag from its definition: fronts ascend in ring order, backs descend, halves and shares are even."""
    num_ranges = np.diff(np.append(flat.shard_first_range, len(flat.range_shard)))
    is_ring = flat.shard_width > 1
    bad = _first(num_ranges > np.where(is_ring, 2, 1))
    if bad is not None:
        most = 2 if is_ring[bad] else 1
        law = f"a shard of seq {flat.shard_seq[bad]} has {num_ranges[bad]} ranges, at most {most} is allowed here"
        _fail(plan, law, [flat.where(bad)])
    ranks = _ints([rank for rank, _ in flat.rows])[flat.shard_row]
    order = np.lexsort((ranks, flat.shard_seq))
    order = order[is_ring[order]]  # rings are contiguous and ascending, so rank order is ring order
    if not order.size:
        return
    seqs, tokens = flat.shard_seq[order], flat.shard_tokens[order]
    lengths, widths = _ints(plan.lengths)[seqs], flat.shard_width[order]
    first, last = flat.shard_first_range[order], flat.shard_first_range[order] + num_ranges[order] - 1
    front = flat.range_stop[first] - flat.range_start[first]
    back = tokens - front
    opens = np.flatnonzero(np.append(True, seqs[1:] != seqs[:-1]))
    front_before, back_before = (_sums_before(part, opens) for part in (front, back))
    wrong = (tokens < lengths // widths) | (tokens > -(-lengths // widths)) | (front - back < 0) | (front - back > 1)
    wrong |= flat.range_start[first] != front_before
    wrong |= (back > 0) & (flat.range_stop[last] != lengths - back_before)
    bad = _first(wrong)
    if bad is not None:
        row = flat.where(int(order[bad]))
        member = int(bad - opens[np.searchsorted(opens, bad, side="right") - 1])
        other = 2 * int(widths[bad]) - 1 - member
        law = f"rank {row[0]} does not hold parts {member} and {other} (of {2 * widths[bad]}) of seq {seqs[bad]}"
        _fail(plan, law, [row])


def _sums_before(values: _Ints, opens: _Ints) -> _Ints:
    """For each entry the sum of the entries before it in its segment; segments begin at ``opens``."""
    before = np.cumsum(values) - values
    sizes = np.diff(np.append(opens, len(values)))
    return np.asarray(before - np.repeat(before[opens], sizes), dtype=np.int64)


def _check_capacity(plan: StepPlan, flat: _Flat, tokens_multiple: int) -> None:
    tokens = np.zeros(len(flat.rows), dtype=np.int64)
    np.add.at(tokens, flat.shard_row, flat.shard_tokens)
    padded = -(-tokens // tokens_multiple) * tokens_multiple
    bad = _first(padded > plan.tokens_per_rank)
    if bad is not None:
        rank, index = flat.rows[bad]
        text = f"rank {rank} micro-batch {index} has {tokens[bad]} tokens ({padded[bad]} padded)"
        _fail(plan, f"{text}, more than C = {plan.tokens_per_rank}", [(rank, index)])


def _check_memory_order(plan: StepPlan, flat: _Flat) -> None:
    is_ring = flat.shard_width > 1
    same = flat.shard_row[1:] == flat.shard_row[:-1]
    bad = _first(same & is_ring[1:] & ~is_ring[:-1])
    if bad is not None:
        law = f"the ring shard of seq {flat.shard_seq[bad + 1]} comes after a local one"
        _fail(plan, law, [flat.where(bad + 1)])
    bad = _first(same & is_ring[1:] & (flat.shard_seq[1:] <= flat.shard_seq[:-1]))
    if bad is not None:
        law = f"ring shards of seq {flat.shard_seq[bad]} and seq {flat.shard_seq[bad + 1]} are not ordered by sequence"
        _fail(plan, law, [flat.where(bad + 1)])


def _check_global_order(plan: StepPlan) -> None:
    """Run the plan without times: a class runs once it is next on every rank that has it."""
    classes = ring_classes(plan)
    members: dict[int, list[tuple[int, int]]] = {}
    for rank, row in enumerate(classes):
        for index, number in enumerate(row):
            members.setdefault(number, []).append((rank, index))
    for rows in members.values():
        for one, other in zip(rows, rows[1:], strict=False):
            if one[0] == other[0]:
                law = f"rank {one[0]} micro-batches {one[1]} and {other[1]} must run at the same time: rings tie them"
                _fail(plan, law, [one, other])
    missing = [len(members[number]) for number in range(len(members))]
    heads = [0] * len(classes)
    arrived = [row[0] for row in classes if row]
    while arrived:
        number = arrived.pop()
        missing[number] -= 1
        if missing[number]:
            continue
        for rank, index in members[number]:
            heads[rank] = index + 1
            arrived.extend(classes[rank][index + 1 : index + 2])
    if any(head < len(row) for head, row in zip(heads, classes, strict=True)):
        _fail_deadlock(plan, classes, members, heads)


def _fail_deadlock(
    plan: StepPlan, classes: list[list[int]], members: dict[int, list[tuple[int, int]]], heads: list[int]
) -> NoReturn:
    """Name a cycle: each stuck class waits for a rank that wants to run another stuck class first."""
    rank = next(rank for rank, row in enumerate(classes) if heads[rank] < len(row))
    waits: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}  # class -> (what a rank runs first, the wanted row)
    number = classes[rank][heads[rank]]
    while number not in waits:
        wanted = next((rank, index) for rank, index in members[number] if heads[rank] < index)
        first = (wanted[0], heads[wanted[0]])
        waits[number] = (first, wanted)
        number = classes[first[0]][first[1]]
    cycle = list(waits)[list(waits).index(number) :]
    steps = [f"rank {waits[c][0][0]} runs micro-batch {waits[c][0][1]} before {waits[c][1][1]}" for c in cycle]
    rows = {row for c in cycle for row in waits[c]}
    _fail(plan, f"deadlock, the ranks have no common order of their rings: {'; '.join(steps)}", rows)
