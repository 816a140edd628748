"""Groups whose prompt is computed once for all answers.

A plan places such a group as one sequence on one rank: the tokens that all documents of the group share, then the rest
of each document. The rest attends to itself and to the shared tokens, so losses and gradients equal the copies'::

    keys             shared   rest 0   rest 1   rest 2
    shared           tri
    rest 0           all      tri
    rest 1           all               tri
    rest 2           all                        tri

The last token of a prompt predicts the first token of each answer, so it belongs to the rest of each document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from bytescale_ext.attention.layouts.blocks import Interval, PlacedBlock
from bytescale_ext.attention.layouts.layout import AttentionLayout
from bytescale_ext.attention.layouts.rows import CuSeqlens
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

    @property
    def squares(self) -> int:
        """Work of the attention in squared tokens: s^2 for a document of s tokens."""
        return self.shared**2 + sum(rest**2 + 2 * rest * self.shared for rest in self.rests)


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Rule for the groups of a step whose prompt is computed once.

    Attributes:
        most_tokens: limit of the tokens of such a group, which has no ring.
        cost: cost of a sequence in both directions.
    """

    most_tokens: int
    cost: CostModel

    def sequences(
        self, source: PromptSource, documents: Sequence[int], lengths: Sequence[int]
    ) -> tuple[PlannedSequence, ...]:
        """Return the sequences to plan; a group without shared tokens, or with too many tokens, is its documents.

        ``documents``, ``lengths``: numbers of the documents of a step in the source, and their tokens: [n] each.
        """
        found: list[PlannedSequence] = []
        first = 0
        while first < len(documents):
            end = first + len(source.members(documents[first]))
            group = PlannedSequence(first, tuple(lengths[first:end]), source.shared_tokens(documents[first]))
            if end - first > 1 and group.shared and group.num_tokens <= self.most_tokens:
                found.append(group)
            else:
                found += [PlannedSequence(place, (lengths[place],)) for place in range(first, end)]
            first = end
        return tuple(found)

    def pays(self, plan: StepPlan, sequences: Sequence[PlannedSequence], copies: StepPlan) -> bool:
        """Return whether a plan of these sequences is possible, and ends before a plan of all documents.

        It is not possible if a group with shared tokens has a ring.
        """
        for rank in range(plan.num_ranks):
            for micro_batch in plan.ranks[rank]:
                if any(sequences[shard.seq].shared and len(shard.ring) > 1 for shard in micro_batch.shards):
                    return False
        return self._seconds(plan, sequences) < self._seconds(copies, None)

    def _seconds(self, plan: StepPlan, sequences: Sequence[PlannedSequence] | None) -> float:
        """Return the cost of the slowest rank; ``sequences``: of the plan, None if all are documents."""
        most = 0.0
        for rank in range(plan.num_ranks):
            cost = 0.0
            for micro_batch in plan.ranks[rank]:
                cost += self.cost.micro_batch_cost(micro_batch, plan.lengths)
                groups = [] if sequences is None else [sequences[shard.seq] for shard in micro_batch.shards]
                cost -= self.cost.a * sum(group.num_tokens**2 - group.squares for group in groups if group.shared)
            most = max(most, cost)
        return most


def unit_of_documents(unit: Unit, sequences: Sequence[PlannedSequence], rank: int) -> Unit:
    """Return a unit of a plan with documents in place of sequences; it has the same rows.

    The first document of a group has its shared tokens and, after them, the rest as another shard.

    Args:
        unit: unit of the plan, a whole micro-batch.
        sequences: sequences of the plan.
        rank: HDP rank.
    """
    layout = unit.layout
    assert isinstance(layout, AttentionLayout), f"{layout=}"
    shards: list[Shard] = []
    queries: list[Interval] = []
    keys: list[Interval] = []
    counted: list[int] = []
    row, others = 0, iter(unit.counted_lengths)
    for shard in unit.micro_batch.shards:
        sequence = sequences[shard.seq]
        end, is_counted = row + shard.num_tokens, shard.ring[0] == rank
        if not sequence.shared:
            shards.append(replace(shard, seq=sequence.first))
            counted += [next(others)] if is_counted else []
        else:
            assert len(shard.ring) == 1, f"{shard=}"
            shards.append(replace(shard, seq=sequence.first, ranges=((0, sequence.shared),)))
            shards += [
                replace(shard, seq=sequence.first + number, ranges=((sequence.shared, length),))
                for number, length in enumerate(sequence.lengths)
            ]
            counted += [sequence.shared, *sequence.rests]
            next(others)
            queries.append((row + sequence.shared, end))
            keys.append((row, row + sequence.shared))
        row = end
    if not queries:
        return replace(unit, micro_batch=replace(unit.micro_batch, shards=tuple(shards)))
    local = CuSeqlens.of_lengths([shard.num_tokens for shard in shards if len(shard.ring) == 1])
    assert layout.local_start + local.num_tokens == row, f"{layout=} {local=}"
    return replace(
        unit,
        micro_batch=replace(unit.micro_batch, shards=tuple(shards)),
        layout=replace(layout, local=local, local_prefix=PlacedBlock.of(queries, keys)),
        counted_lengths=tuple(counted),
    )
