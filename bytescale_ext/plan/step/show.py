"""A step plan as text: one row for each rank and micro-batch."""

from __future__ import annotations

from collections.abc import Collection

from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
from bytescale_ext.plan.step.plan import StepPlan

_HEADER = "   rank  micro-batch   tokens  shards"
_SKIPPED = "     ..."


def shard_text(shard: Shard) -> str:
    """Return a text like ``seq 3 [0:512][3584:4096] ring 0-7 in 2 inner rings``; a local shard has no ring."""
    ranges = "".join(f"[{start}:{stop}]" for start, stop in shard.ranges)
    ring = "" if len(shard.ring) == 1 else f" ring {ring_text(shard.ring)}"
    form = "" if shard.inner_rings == 1 else f" in {shard.inner_rings} inner rings"
    shares = f" with shares {','.join(map(str, shard.shares))}" if shard.shares else ""
    return f"seq {shard.seq} {ranges}{ring}{form}{shares}"


def ring_text(ring: tuple[int, ...]) -> str:
    """Return ``0-7`` for three or more contiguous ascending ranks, else all ranks, like ``0,2,1``."""
    if len(ring) > 2 and ring == tuple(range(ring[0], ring[0] + len(ring))):
        return f"{ring[0]}-{ring[-1]}"
    return ",".join(str(rank) for rank in ring)


def plan_table(
    plan: StepPlan,
    marked: Collection[tuple[int, int]] = (),
    max_rows: int | None = None,
    max_shards: int = 6,
) -> str:
    """Return the plan as a table.

    Args:
        plan: any plan, valid or not.
        marked: ``(rank, micro-batch)`` of the rows to mark with ``>>`` and to show in full.
        max_rows: largest number of rows to show, around the marked rows; None: all rows.
        max_shards: largest number of shards to show in a row without a mark.
    """
    rows = [(rank, index) for rank, micro_batches in enumerate(plan.ranks) for index in range(len(micro_batches))]
    chosen = _chosen_rows(rows, marked, max_rows)
    lines = [_HEADER]
    previous = -1
    for number in chosen:
        if number != previous + 1:
            lines.append(_SKIPPED)
        previous = number
        rank, index = rows[number]
        lines.append(_row_text(plan.ranks[rank][index], rank, index, (rank, index) in marked, max_shards))
    if previous + 1 < len(rows):
        lines.append(_SKIPPED)
    return "\n".join(lines)


def plan_line(plan: StepPlan) -> str:
    """Return a line with the sequences, tokens and ranks, and the range of micro-batches and tokens per rank."""
    counts = [len(rank) for rank in plan.ranks]
    tokens = [sum(micro_batch.num_tokens for micro_batch in rank) for rank in plan.ranks]
    return (
        f"{len(plan.lengths)} sequences, {sum(plan.lengths)} tokens on {plan.num_ranks} ranks of "
        f"{plan.tokens_per_rank} tokens: {_span_text(counts)} micro-batches and {_span_text(tokens)} tokens per rank"
    )


def plan_text(plan: StepPlan, max_rows: int | None = None) -> str:
    """Return the table and, below it, the summary line."""
    return f"{plan_table(plan, max_rows=max_rows)}\n{plan_line(plan)}"


def _span_text(values: list[int]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low}-{high}"


def _chosen_rows(rows: list[tuple[int, int]], marked: Collection[tuple[int, int]], max_rows: int | None) -> list[int]:
    """Return the indices of the rows nearest to a marked row, or to the first row if no row is marked."""
    if max_rows is None or len(rows) <= max_rows:
        return list(range(len(rows)))
    targets = [number for number, row in enumerate(rows) if row in marked][:max_rows] or [0]
    chosen = set(targets)
    for distance in range(1, len(rows)):
        for number in (target + offset for target in targets for offset in (-distance, distance)):
            if len(chosen) >= max_rows:
                return sorted(chosen)
            if 0 <= number < len(rows):
                chosen.add(number)
    return sorted(chosen)


def _row_text(micro_batch: MicroBatch, rank: int, index: int, is_marked: bool, max_shards: int) -> str:
    shards = micro_batch.shards if is_marked else micro_batch.shards[:max_shards]
    text = ", ".join(shard_text(shard) for shard in shards) or "(empty)"
    hidden = len(micro_batch.shards) - len(shards)
    if hidden:
        text += f", and {hidden} more"
    return f"{'>>' if is_marked else '  '} {rank:>4}  {index:>11}  {micro_batch.num_tokens:>7}  {text}"
