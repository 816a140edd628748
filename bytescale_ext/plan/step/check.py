"""The validator of step plans. It shares no code with the planners.

It reads the plan's table, which is also the source of the micro-batches that ranks run (``PlacedRanks``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.show import plan_line, plan_table, ring_text
from bytescale_ext.plan.step.table import PlanTable, table_of

_MAX_ROWS = 40
_Ints = npt.NDArray[np.int64]


def check_step_plan(
    plan: StepPlan,
    lengths: Sequence[int] | None = None,
    tokens_multiple: int = 1,
    num_layers: int | None = None,
    ranks_per_node: int | None = None,
) -> None:
    """Raise PlanError unless the plan keeps every law.

    1. There is one list of micro-batches per rank. Lengths are positive (and equal ``lengths`` if given), and so is C.
    2. No shard is empty. A micro-batch may be empty only in aligned slots. Token ranges are inside their sequence,
       ascend and do not overlap.
    3. Every token of every sequence is computed exactly once.
    4. All shards of a sequence name the same ring of contiguous ascending ranks. Each of these ranks holds one shard.
    5. Ring member i of D holds parts i and 2D-1-i of the sequence (ByteScale section 7, Fig. 14). Shares differ by at
       most one token, or all shards of the sequence name the same uneven shares. Slices and aligned slots have no
       uneven shares. A sequence on one rank is one range.
    6. A micro-batch has at most C tokens after padding at its end to a multiple of ``tokens_multiple``. With offloading
       only tokens on the device count: ``n (2 + (1 - r) (l - 2)) / l`` of n tokens with a share r of ``num_layers`` l
       layers (ByteScale Eq. 3). Without ``num_layers`` nothing may be offloaded.
    7. In a micro-batch, ring shards come first, ordered by sequence; then local shards.
    8. There is one global order. Micro-batches that share a ring sequence run together as a coupled group. A rank has
       at most one micro-batch of a group, and the running orders of all ranks agree, so no rank waits forever.
    9. In aligned slots, the shards of a sequence have the same micro-batch index on every rank of its ring, so no two
       pipelines wait for each other forever.
    10. All shards of a sequence name the same number of inner rings. Several inner rings have equally many ranks, at
        least two, begin at multiples of their size, and tile nodes of ``ranks_per_node``.

    The message holds the law and the printed plan (at most about 40 rows), with ``>>`` before each bad row.
    """
    _check_shape(plan, lengths, tokens_multiple)
    table = table_of(plan.ranks)
    _check_rows(plan, table)
    _check_ranges(plan, table)
    _check_coverage(plan, table)
    _check_rings(plan, table)
    _check_shares(plan, table)
    _check_capacity(plan, table, tokens_multiple, num_layers)
    _check_memory_order(plan, table)
    _check_aligned(plan, table)
    _check_forms(plan, table, ranks_per_node)
    _check_global_order(plan, table)


def groups_of(plan: StepPlan) -> list[list[int]]:
    """Return the coupled group of each micro-batch of each rank (``table.coupled_groups``)."""
    table = table_of(plan.ranks)
    groups = iter(table.row_groups.tolist())
    return [[next(groups) for _ in range(count)] for count in table.counts.tolist()]


def _fail(plan: StepPlan, law: str, marked: Collection[tuple[int, int]] = ()) -> NoReturn:
    """Raise PlanError with the law, the table and a summary. The bad rows are marked, or the law if there are none."""
    heading = law if marked else f">> {law}"
    raise PlanError(f"{heading}\n{plan_table(plan, marked, max_rows=_MAX_ROWS)}\n{plan_line(plan)}")


def _check_shape(plan: StepPlan, lengths: Sequence[int] | None, tokens_multiple: int) -> None:
    if plan.num_ranks < 1 or len(plan.ranks) != plan.num_ranks:
        _fail(plan, f"the plan is for {plan.num_ranks} ranks and lists micro-batches of {len(plan.ranks)}")
    if plan.tokens_per_rank < 1 or tokens_multiple < 1 or plan.tokens_per_rank % tokens_multiple:
        _fail(plan, f"C = {plan.tokens_per_rank} tokens per rank is not a positive multiple of {tokens_multiple}")
    bad = _first(_ints(plan.lengths) < 1)
    if bad is not None:
        _fail(plan, f"seq {bad} has {plan.lengths[bad]} tokens; a sequence needs at least 1")
    if lengths is None:
        return
    if len(lengths) != len(plan.lengths):
        _fail(plan, f"the plan has {len(plan.lengths)} sequences, the step has {len(lengths)}")
    bad = _first(_ints(plan.lengths) != _ints(lengths))
    if bad is not None:
        _fail(plan, f"seq {bad} has {plan.lengths[bad]} tokens in the plan and {lengths[bad]} in the step")


def _check_rows(plan: StepPlan, table: PlanTable) -> None:
    """Refuse empty micro-batches, empty shards and unknown sequences."""
    bad = _first(np.bincount(table.shard_rows, minlength=len(table.row_ranks)) == 0)
    if bad is not None and not plan.aligned:
        row = int(table.row_ranks[bad]), int(table.row_indices[bad])
        _fail(plan, f"rank {row[0]} micro-batch {row[1]} is empty", [row])
    bad = _first((table.seqs < 0) | (table.seqs >= len(plan.lengths)))
    if bad is not None:
        text = f"seq {table.seqs[bad]} does not exist, the step has {len(plan.lengths)}"
        _fail(plan, text, [table.where(bad)])
    bad = _first((table.num_ranges == 0) | (table.ring_widths == 0))
    if bad is not None:
        missing = "ring" if table.num_ranges[bad] else "token range"
        _fail(plan, f"a shard of seq {table.seqs[bad]} has no {missing}", [table.where(bad)])


def _ints(values: Sequence[int]) -> _Ints:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise PlanError("a number has more than 64 bits") from None


def _first(mask: npt.NDArray[np.bool_]) -> int | None:
    """Return the index of the first True, or None."""
    index = int(np.argmax(mask)) if mask.size else 0
    return index if mask.size and mask[index] else None


def _check_ranges(plan: StepPlan, table: PlanTable) -> None:
    lengths = _ints(plan.lengths)
    stops = lengths[table.seqs[table.range_shards]]
    bad = _first((table.starts < 0) | (table.starts >= table.stops) | (table.stops > stops))
    if bad is not None:
        shard = int(table.range_shards[bad])
        seq = int(table.seqs[shard])
        text = f"[{table.starts[bad]}:{table.stops[bad]}]"
        _fail(plan, f"range {text} of seq {seq} is empty or outside [0:{plan.lengths[seq]}]", [table.where(shard)])
    same_shard = table.range_shards[1:] == table.range_shards[:-1]
    bad = _first(same_shard & (table.starts[1:] < table.stops[:-1]))
    if bad is not None:
        shard = int(table.range_shards[bad])
        _fail(plan, f"ranges of a shard of seq {table.seqs[shard]} overlap or descend", [table.where(shard)])


def _check_coverage(plan: StepPlan, table: PlanTable) -> None:
    """Check that the sorted ranges of each sequence follow each other without gaps from 0 to its length."""
    seqs = table.seqs[table.range_shards]
    order = np.lexsort((table.starts, seqs))
    seqs, starts, stops = seqs[order], table.starts[order], table.stops[order]
    shards = table.range_shards[order]
    missing = np.flatnonzero(np.bincount(seqs, minlength=len(plan.lengths)) == 0)
    if missing.size:
        _fail(plan, f"seq {missing[0]} of {plan.lengths[missing[0]]} tokens is on no rank")
    is_first = np.append(True, seqs[1:] != seqs[:-1])[: len(seqs)]
    expected = np.where(is_first, 0, np.append(0, stops[:-1])[: len(seqs)])
    bad = _first(starts != expected)
    if bad is not None:
        seq, start, covered = int(seqs[bad]), int(starts[bad]), int(expected[bad])
        if start > covered:
            _fail(plan, f"tokens [{covered}:{start}] of seq {seq} are on no rank", [table.where(int(shards[bad]))])
        pair = {table.where(int(shards[bad])), table.where(int(shards[bad - 1]))}
        _fail(plan, f"tokens [{start}:{min(covered, int(stops[bad]))}] of seq {seq} are computed twice", pair)
    is_last = np.append(is_first[1:], True)[: len(seqs)]
    bad = _first(is_last & (stops != _ints(plan.lengths)[seqs]))
    if bad is not None:
        seq = int(seqs[bad])
        text = f"tokens [{stops[bad]}:{plan.lengths[seq]}] of seq {seq} are on no rank"
        _fail(plan, text, [table.where(int(shards[bad]))])


def _check_rings(plan: StepPlan, table: PlanTable) -> None:
    ranks = table.row_ranks[table.shard_rows]
    firsts, widths = table.ring_firsts, table.ring_widths
    is_odd = (firsts < 0) | (firsts + widths > plan.num_ranks)
    is_odd[list(table.odd_rings)] = True
    bad = _first(is_odd)
    if bad is not None:
        text = f"ring {ring_text(table.ring(bad))} of seq {table.seqs[bad]} is not a run of contiguous ascending ranks"
        _fail(plan, f"{text} in 0-{plan.num_ranks - 1}", [table.where(bad)])
    order = np.lexsort((ranks, table.seqs))
    seqs, holders = table.seqs[order], ranks[order]
    opens = np.flatnonzero(np.append(True, seqs[1:] != seqs[:-1])[: len(seqs)])
    sizes = np.diff(np.append(opens, len(seqs)))
    heads = np.repeat(order[opens], sizes)
    bad = _first((firsts[order] != firsts[heads]) | (widths[order] != widths[heads]))
    if bad is not None:
        shard, text = int(order[bad]), ring_text(table.ring(int(heads[bad])))
        law = f"rank {holders[bad]} has ring {ring_text(table.ring(shard))} for seq {seqs[bad]}, others have"
        _fail(plan, f"{law} ring {text}", [table.where(shard)])
    bad = _first((holders < firsts[order]) | (holders >= (firsts + widths)[order]))
    if bad is not None:
        shard = int(order[bad])
        text = ring_text(table.ring(shard))
        _fail(plan, f"rank {holders[bad]} holds seq {seqs[bad]} and is not in its ring {text}", [table.where(shard)])
    bad = _first((seqs[1:] == seqs[:-1]) & (holders[1:] == holders[:-1]))
    if bad is not None:
        pair = {table.where(int(shard)) for shard in order[bad : bad + 2]}
        _fail(plan, f"rank {holders[bad]} holds two shards of seq {seqs[bad]}", pair)
    bad = _first(sizes != widths[order[opens]])
    if bad is not None:
        shards = order[opens[bad] : opens[bad] + sizes[bad]]
        ring = table.ring(int(shards[0]))
        absent = min(set(ring) - set(ranks[shards].tolist()))
        law = f"rank {absent} is in ring {ring_text(ring)} of seq {table.seqs[shards[0]]} and holds no shard of it"
        _fail(plan, law, {table.where(int(shard)) for shard in shards})


def _check_shares(plan: StepPlan, table: PlanTable) -> None:
    """Check the zigzag by its definition: front parts ascend in ring order, back parts descend, and sizes are even."""
    num_ranges = table.num_ranges
    is_ring = table.ring_widths > 1
    first_shards: dict[int, int] = {}
    for shard in sorted(table.shares):
        first_shards.setdefault(int(table.seqs[shard]), shard)
    for shard in first_shards.values():
        _check_uneven(plan, table, shard)
    bad = _first(num_ranges > np.where(is_ring, 2, 1))
    if bad is not None:
        most = 2 if is_ring[bad] else 1
        law = f"a shard of seq {table.seqs[bad]} has {num_ranges[bad]} ranges, at most {most} is allowed here"
        _fail(plan, law, [table.where(bad)])
    ranks = table.row_ranks[table.shard_rows]
    order = np.lexsort((ranks, table.seqs))
    order = order[is_ring[order]]  # rings are contiguous and ascending, so rank order is ring order
    if not order.size:
        return
    seqs, tokens = table.seqs[order], table.tokens[order]
    lengths, widths = _ints(plan.lengths)[seqs], table.ring_widths[order]
    first, last = table.first_ranges[order], table.first_ranges[order] + num_ranges[order] - 1
    front = table.stops[first] - table.starts[first]
    back = tokens - front
    opens = np.flatnonzero(np.append(True, seqs[1:] != seqs[:-1]))
    front_before, back_before = (_sums_before(part, opens) for part in (front, back))
    low, high = lengths // widths, -(-lengths // widths)
    places = {shard: place for place, shard in enumerate(order.tolist()) if shard in table.shares}
    for shard, place in places.items():
        low[place] = high[place] = table.shares[shard][ranks[shard] - table.ring_firsts[shard]]
    wrong = (tokens < low) | (tokens > high) | (front - back < 0) | (front - back > 1)
    wrong |= table.starts[first] != front_before
    wrong |= (back > 0) & (table.stops[last] != lengths - back_before)
    bad = _first(wrong)
    if bad is not None:
        row = table.where(int(order[bad]))
        member = int(bad - opens[np.searchsorted(opens, bad, side="right") - 1])
        other = 2 * int(widths[bad]) - 1 - member
        law = f"rank {row[0]} does not hold parts {member} and {other} (of {2 * widths[bad]}) of seq {seqs[bad]}"
        _fail(plan, law, [row])


def _check_uneven(plan: StepPlan, table: PlanTable, shard: int) -> None:
    """Check that the shares of an uneven ring are possible, and that all shards of the sequence name them."""
    seq, shares = int(table.seqs[shard]), table.shares[shard]
    if plan.aligned or (plan.slicing is not None and plan.slicing.num_slices > 1):
        _fail(plan, f"seq {seq} has uneven shares, which slices and aligned slots cannot have", [table.where(shard)])
    is_whole = len(shares) == table.ring_widths[shard] > 1 and min(shares) > 0 and sum(shares) == plan.lengths[seq]
    others = np.flatnonzero(table.seqs == seq).tolist()
    if not is_whole or any(table.shares.get(other) != shares for other in others):
        text = f"the shares {','.join(map(str, shares))} of seq {seq} of {plan.lengths[seq]} tokens do not fit its ring"
        _fail(plan, f"{text}, or its shards name different shares", [table.where(other) for other in others])


def _sums_before(values: _Ints, opens: _Ints) -> _Ints:
    """Return the sum of the values before each value in its segment: [n], as ``values``. ``opens``: segment starts."""
    before = np.cumsum(values) - values
    sizes = np.diff(np.append(opens, len(values)))
    return np.asarray(before - np.repeat(before[opens], sizes), dtype=np.int64)


def _check_capacity(plan: StepPlan, table: PlanTable, tokens_multiple: int, num_layers: int | None) -> None:
    shares = table.offloads
    bad = _first(~((shares >= 0) & (shares <= (0 if num_layers is None else 1))))
    if bad is not None:
        row = int(table.row_ranks[bad]), int(table.row_indices[bad])
        law = (
            "outside 0 to 1" if num_layers is not None else "of its activations, but the number of layers is not given"
        )
        _fail(plan, f"rank {row[0]} micro-batch {row[1]} offloads {shares[bad]} {law}", [row])
    tokens = np.bincount(table.shard_rows, weights=table.tokens, minlength=len(shares)).astype(np.int64)
    padded = -(-tokens // tokens_multiple) * tokens_multiple
    kept = padded.astype(np.float64)
    if num_layers is not None and num_layers > 2:  # two layers stay: one computes while another is copied
        kept *= (2 + (1 - shares) * (num_layers - 2)) / num_layers
    bad = _first(kept > plan.tokens_per_rank * (1 + 1e-9))
    if bad is not None:
        rank, index = int(table.row_ranks[bad]), int(table.row_indices[bad])
        text = f"rank {rank} micro-batch {index} has {tokens[bad]} tokens ({padded[bad]} padded)"
        text += f", of which {kept[bad]:.0f} stay on the device" if shares[bad] else ""
        _fail(plan, f"{text}, more than C = {plan.tokens_per_rank}", [(rank, index)])


def _check_memory_order(plan: StepPlan, table: PlanTable) -> None:
    is_ring = table.ring_widths > 1
    same = table.shard_rows[1:] == table.shard_rows[:-1]
    bad = _first(same & is_ring[1:] & ~is_ring[:-1])
    if bad is not None:
        law = f"the ring shard of seq {table.seqs[bad + 1]} comes after a local one"
        _fail(plan, law, [table.where(bad + 1)])
    bad = _first(same & is_ring[1:] & (table.seqs[1:] <= table.seqs[:-1]))
    if bad is not None:
        law = f"ring shards of seq {table.seqs[bad]} and seq {table.seqs[bad + 1]} are not ordered by sequence"
        _fail(plan, law, [table.where(bad + 1)])


def _check_aligned(plan: StepPlan, table: PlanTable) -> None:
    if not plan.aligned or not len(table.seqs):
        return
    in_order = np.argsort(table.seqs, kind="stable")
    seqs, slots = table.seqs[in_order], table.row_indices[table.shard_rows[in_order]]
    bad = _first((seqs[1:] == seqs[:-1]) & (slots[1:] != slots[:-1]))
    if bad is not None:
        pair = [table.where(int(shard)) for shard in in_order[bad : bad + 2]]
        text = f"micro-batch {slots[bad]} on rank {pair[0][0]} and {slots[bad + 1]} on rank {pair[1][0]}"
        _fail(plan, f"seq {seqs[bad]} is in {text}; aligned slots need one index on all its ranks", pair)


def _check_forms(plan: StepPlan, table: PlanTable, ranks_per_node: int | None) -> None:
    counts, last_named = table.inner_rings, np.zeros(len(plan.lengths), dtype=np.int64)
    last_named[table.seqs] = counts
    inner = np.maximum(table.ring_widths // np.maximum(counts, 1), 1)
    unequal = (counts < 1) | (inner * counts != table.ring_widths) | ((counts > 1) & (inner < 2))
    node = inner if ranks_per_node is None else ranks_per_node
    across = (counts > 1) & ((table.ring_firsts % inner != 0) | (node % inner != 0))
    for is_bad, law in (
        (counts != last_named[table.seqs], "ranks name different numbers of inner rings"),
        (unequal, "inner rings must have equal sizes, two ranks or more"),
        (across, f"inner rings do not tile {'the ranks' if ranks_per_node is None else f'nodes of {node} ranks'}"),
    ):
        bad = _first(is_bad)
        if bad is not None:
            text = f"{counts[bad]} inner rings of ring {ring_text(table.ring(bad))} of seq {table.seqs[bad]}"
            _fail(plan, f"{text}: {law}", [table.where(bad)])


def _check_global_order(plan: StepPlan, table: PlanTable) -> None:
    """Run the plan without times: a coupled group runs once it is next on all its ranks."""
    groups, ranks = table.row_groups, table.row_ranks
    by_group = np.argsort(groups, kind="stable")
    bad = _first((groups[by_group[1:]] == groups[by_group[:-1]]) & (ranks[by_group[1:]] == ranks[by_group[:-1]]))
    if bad is not None:
        first, second = ((int(ranks[row]), int(table.row_indices[row])) for row in by_group[bad : bad + 2])
        law = f"rank {first[0]} micro-batches {first[1]} and {second[1]} must run at the same time: rings couple them"
        _fail(plan, law, [first, second])
    sizes = np.bincount(groups)
    begins = np.cumsum(sizes) - sizes
    has_next = np.append(ranks[1:] == ranks[:-1], False)[: len(ranks)]
    missing = np.bincount(groups[1:][has_next[:-1]], minlength=len(sizes))
    done = np.zeros(len(ranks), dtype=np.bool_)
    ready = np.flatnonzero(missing == 0)
    while len(ready):
        places = np.repeat(begins[ready] - (np.cumsum(sizes[ready]) - sizes[ready]), sizes[ready])
        rows = by_group[places + np.arange(len(places))]
        done[rows] = True
        reached = groups[rows[has_next[rows]] + 1]
        np.subtract.at(missing, reached, 1)
        ready = np.unique(reached[missing[reached] == 0])
    if not done.all():
        _fail_deadlock(plan, np.bincount(ranks[done], minlength=plan.num_ranks).tolist())


def _fail_deadlock(plan: StepPlan, heads: list[int]) -> NoReturn:
    """Raise PlanError with a cycle of groups: each waits for a rank that must run the next group of the cycle first."""
    groups = groups_of(plan)
    members: dict[int, list[tuple[int, int]]] = {}
    for rank, row in enumerate(groups):
        for index, number in enumerate(row):
            members.setdefault(number, []).append((rank, index))
    rank = next(rank for rank, row in enumerate(groups) if heads[rank] < len(row))
    waits: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}  # group -> (row that runs first, row of the group)
    group = groups[rank][heads[rank]]
    while group not in waits:
        waiting = next((rank, index) for rank, index in members[group] if heads[rank] < index)
        first = (waiting[0], heads[waiting[0]])
        waits[group] = (first, waiting)
        group = groups[first[0]][first[1]]
    cycle = list(waits)[list(waits).index(group) :]
    steps = [f"rank {waits[c][0][0]} runs micro-batch {waits[c][0][1]} before {waits[c][1][1]}" for c in cycle]
    rows = {row for c in cycle for row in waits[c]}
    _fail(plan, f"deadlock, the ranks have no common order of their rings: {'; '.join(steps)}", rows)
