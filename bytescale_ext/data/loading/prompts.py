"""Groups whose prompt is computed once for all answers.

A plan places such a group as one sequence: the tokens that all documents of the group share, then the rest of each
document. The rest attends to itself and to the shared tokens (``attention/layouts/parts.py``), so losses and gradients
equal the copies'. The last token of a prompt predicts the first token of each answer, so it belongs to the rest of each
document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from bytescale_ext.attention.layouts.layout import AttentionLayout
from bytescale_ext.attention.layouts.parts import Parts, bounds_of, with_parts
from bytescale_ext.attention.layouts.slices import SliceLayout
from bytescale_ext.data.samples.units import Unit
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.step.micro_batch import Shard
from bytescale_ext.plan.step.plan import StepPlan


@runtime_checkable
class PromptSource(Protocol):
    """A ``TokenSource`` of groups whose documents begin with equal tokens."""

    def members(self, number: int) -> tuple[int, ...]:
        """Return the documents of the group of a document."""
        ...

    def shared_tokens(self, number: int) -> int:
        """Return the number of first tokens that the documents of a group share and that predict no label with a loss.

        ``number``: a document of the group.
        """
        ...


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """A sequence of a plan: one document, or a group whose first tokens are computed once.

    Attributes:
        first: index of its first document among the documents of the step, which follow one another.
        lengths: tokens of each document.
        shared: number of first tokens that are computed once; 0 for a single document.
    """

    first: int
    lengths: tuple[int, ...]
    shared: int = 0

    @property
    def rests(self) -> tuple[int, ...]:
        """Tokens of each document after the shared tokens."""
        return tuple(length - self.shared for length in self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return self.shared + sum(self.rests)

    def within(self, most: int) -> tuple[PlannedSequence, ...]:
        """Return the sequence, or its documents if nothing is shared or it has more than ``most`` tokens."""
        if len(self.lengths) > 1 and self.shared and self.num_tokens <= most:
            return (self,)
        return tuple(PlannedSequence(self.first + number, (length,)) for number, length in enumerate(self.lengths))

    @property
    def squares(self) -> int:
        """Work of the attention in squared tokens: s^2 for a document of s tokens."""
        return self.shared**2 + sum(rest**2 + 2 * rest * self.shared for rest in self.rests)


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Rule for the groups of a step whose prompt is computed once.

    Attributes:
        tokens_per_rank: C, limit of the tokens of a group on one rank.
        widest: number of ranks that may share a group in a ring; 1: such groups have no rings.
        cost: cost of a sequence in both directions.
    """

    tokens_per_rank: int
    widest: int
    cost: CostModel

    def choices(
        self, source: PromptSource, documents: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[tuple[PlannedSequence, ...]]:
        """Yield the sequences to plan: with all groups that fit in a ring, then with groups that fit on one rank.

        A group without shared tokens, or with too many tokens, is its documents. A choice without any group is left
        out. ``documents``, ``lengths``: numbers of the documents of a step in the source, and their tokens: [n] each.
        """
        found: list[PlannedSequence] = []
        first = 0
        while first < len(documents):
            end = first + len(source.members(documents[first]))
            found.append(PlannedSequence(first, tuple(lengths[first:end]), source.shared_tokens(documents[first])))
            first = end
        before = 0
        for width in (self.widest, 1):
            most = width * self.tokens_per_rank
            groups = tuple(part for group in found for part in group.within(most))
            num_shared = sum(group.shared > 0 for group in groups)
            if num_shared and num_shared != before:
                yield groups
            before = num_shared

    def can_run(self, plan: StepPlan, sequences: Sequence[PlannedSequence]) -> bool:
        """Return whether no group with shared tokens has a ring, unless such groups may have rings."""
        rows = (shard for rank in range(plan.num_ranks) for one in plan.ranks[rank] for shard in one.shards)
        return self.widest > 1 or not any(sequences[shard.seq].shared and len(shard.ring) > 1 for shard in rows)

    def seconds(self, plan: StepPlan, sequences: Sequence[PlannedSequence] | None) -> float:
        """Return the cost of the slowest rank; ``sequences``: of the plan, None if all are documents.

        The cost of a group in a ring counts too much attention.
        """
        most = 0.0
        for rank in range(plan.num_ranks):
            cost = 0.0
            for micro_batch in plan.ranks[rank]:
                cost += self.cost.micro_batch_cost(micro_batch, plan.lengths)
                if sequences is not None:
                    local = [sequences[one.seq] for one in micro_batch.shards if len(one.ring) == 1]
                    cost -= self.cost.a * sum(group.num_tokens**2 - group.squares for group in local if group.shared)
            most = max(most, cost)
        return most


def units_of_documents(
    units: Sequence[Unit], sequences: Sequence[PlannedSequence], plan: StepPlan, rank: int
) -> tuple[Unit, ...]:
    """Return the units of a rank's step with documents in place of sequences; they have the same rows.

    The first document of a group has its shared tokens and, after them, the rest as further shards.

    Args:
        units: units of the plan, micro-batches or slices.
        sequences: sequences of the plan.
        plan: plan of the step.
        rank: HDP rank.
    """
    parts = {number: (one.shared, *one.rests) for number, one in enumerate(sequences) if one.shared}
    micro_batches = plan.ranks[rank]
    num_slices = len(units) // max(len(micro_batches), 1)
    found = []
    for number, unit in enumerate(units):
        counted: tuple[int, ...] = ()
        if number % num_slices == 0:
            shards = micro_batches[number // num_slices].shards
            seqs = [shard.seq for shard in shards if shard.ring[0] == rank]
            counted = tuple(length for seq in seqs for length in parts.get(seq, sequences[seq].lengths))
        of_documents = tuple(one for shard in unit.micro_batch.shards for one in _documents(shard, sequences, parts))
        micro_batch = replace(unit.micro_batch, shards=of_documents)
        layout = _with_parts(unit, parts)
        found.append(replace(unit, micro_batch=micro_batch, layout=layout, counted_lengths=counted))
    return tuple(found)


def _documents(shard: Shard, sequences: Sequence[PlannedSequence], parts: Parts) -> Iterator[Shard]:
    """Yield the shards of documents in the rows of a shard of a sequence, in memory order."""
    sequence = sequences[shard.seq]
    if not sequence.shared:
        yield replace(shard, seq=sequence.first)
        return
    for first, last in shard.ranges:
        for number, (start, stop) in enumerate(bounds_of(parts, shard.seq, last)):
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                ahead = sequence.shared if number else 0  # tokens of the document before the part
                tokens = (ahead + begin - start, ahead + end - start)
                yield replace(shard, seq=sequence.first + max(number - 1, 0), ranges=(tokens,))


def _with_parts(unit: Unit, parts: Parts) -> AttentionLayout | SliceLayout:
    """Return the layout of a unit of a plan with the parts of groups."""
    layout, shards = unit.layout, unit.micro_batch.shards
    if isinstance(layout, AttentionLayout):
        return with_parts(layout, shards, layout.num_tokens, parts)
    key_end = layout.own.intervals[-1][1] if layout.own.intervals else 0
    return replace(layout, attention=with_parts(layout.attention, shards, key_end, parts))
