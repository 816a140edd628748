"""Prompts that are computed once: attention, rows and losses of the copies, fewer tokens, and plans that do without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bytescale_ext.attention.virtual import mailbox_comms
from bytescale_ext.data.loading.loader import StepLoader
from bytescale_ext.data.loading.planning import PlanMaker
from bytescale_ext.data.loading.prompts import PlannedSequence, SharedPrompts, units_of_documents
from bytescale_ext.data.loading.step import LoaderSettings, StepBatch
from bytescale_ext.data.samples.units import units_of
from bytescale_ext.errors import OutOfTime
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster
from tests.attention.cases import Case, dense_attention, run_round
from tests.data.sources import MemorySource
from tests.plan.simple_plans import plan_naive

GROUP = PlannedSequence(2, (9, 7, 12), 5)
SEQUENCES = (PlannedSequence(0, (11,)), PlannedSequence(1, (6,)), GROUP, PlannedSequence(5, (8, 4), 3))
DOCUMENTS = Case((11, 6, 9, 7, 12, 8, 4), (), num_ranks=2)
PROMPTS = {2: 2, 3: 2, 4: 2, 5: 5, 6: 5}
SHARED = {2: 5, 3: 5, 4: 5, 5: 3, 6: 3}
LENGTHS = tuple(sequence.num_tokens for sequence in SEQUENCES)
RANKS = (
    (Shard(0, zigzag_ranges(11, 2, 0), (0, 1)), Shard(1, ((0, 6),), (0,)), Shard(2, ((0, LENGTHS[2]),), (0,))),
    (Shard(0, zigzag_ranges(11, 2, 1), (0, 1)), Shard(3, ((0, LENGTHS[3]),), (1,))),
)


def values_of(document: int) -> list[torch.Tensor]:
    """Return ``q, k, v, dout`` of a document; the first tokens of a group have equal ``q, k, v``."""
    tensors = list(DOCUMENTS.values(document, torch.float64))
    if document in PROMPTS:
        first = DOCUMENTS.values(PROMPTS[document], torch.float64)
        n = SHARED[document]
        tensors[:3] = [torch.cat((a[:n], b[n:])) for a, b in zip(first[:3], tensors[:3], strict=True)]
    return tensors


def test_attention_is_that_of_the_copies_beside_rings() -> None:
    answers = []
    for document, length in enumerate(DOCUMENTS.lengths):
        q, k, v, dout = (one.requires_grad_() for one in values_of(document))
        out = dense_attention(q, k, v, (length,), DOCUMENTS.scale)
        answers.append((out.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach())))
    plan = StepPlan(2, 64, LENGTHS, tuple((MicroBatch(shards),) for shards in RANKS))
    units = [
        units_of_documents(units_of(plan.ranks[rank], LENGTHS, rank, 4, None), SEQUENCES, plan, rank)[0]
        for rank in range(2)
    ]
    assert [unit.counted_lengths for unit in units] == [(11, 6, 5, 4, 2, 7), (3, 5, 1)]
    inputs = []
    for unit in units:
        columns = [torch.zeros(unit.num_rows, count, 8, dtype=torch.float64) for count in (4, 2, 2, 4)]
        for rows, document, part in places_of(unit.micro_batch):
            for number, (column, whole) in enumerate(zip(columns, values_of(document), strict=True)):
                is_sum = number == 3 and document in PROMPTS and part.stop <= SHARED[document]
                members = [one for one in PROMPTS if PROMPTS[one] == document] if is_sum else []
                column[rows] = sum(values_of(one)[3][part] for one in members) if is_sum else whole[part]
        inputs.append(columns)
    backends = [DOCUMENTS.backend(comm) for comm in mailbox_comms(2)]
    found = run_round([unit.layout for unit in units], inputs, backends)  # type: ignore[misc]
    for unit, tensors in zip(units, found, strict=True):
        for rows, document, part in places_of(unit.micro_batch):
            members = [one for one in PROMPTS if PROMPTS[one] == document]
            is_shared = document in PROMPTS and part.stop <= SHARED[document]
            assert torch.allclose(tensors[0][rows], answers[document][0][part], atol=1e-12)
            for column in range(1, 4):
                parts = [answers[one][column][part] for one in (members if is_shared else [document])]
                assert torch.allclose(tensors[column][rows], torch.stack(parts).sum(0), atol=1e-12), (document, column)


def places_of(micro_batch: MicroBatch) -> list[tuple[slice, int, slice]]:
    """Return (rows, document, tokens) of each range of a micro-batch of documents."""
    found, row = [], 0
    for shard in micro_batch.shards:
        for start, stop in shard.ranges:
            found.append((slice(row, row + stop - start), shard.seq, slice(start, stop)))
            row += stop - start
    return found


class Groups(MemorySource):
    """Groups in memory, whose documents share the tokens before ``prompt``; the other tokens are answers."""

    def __init__(self, groups: Sequence[tuple[int, Sequence[int]]]) -> None:
        super().__init__([prompt + answer for prompt, answers in groups for answer in answers])
        self.groups, self.prompts = [], []
        for prompt, answers in groups:
            members = tuple(range(len(self.prompts), len(self.prompts) + len(answers)))
            self.groups += [members] * len(answers)
            self.prompts += [prompt] * len(answers)
            for one in members:
                self.documents[one][:prompt] = self.documents[members[0]][:prompt]

    def members(self, number: int) -> tuple[int, ...]:
        """Return the documents of a document's group."""
        return self.groups[number]

    def sample_lengths(self, samples: object) -> np.ndarray:
        """Not asked here: [0]."""
        return np.zeros(0)

    def shared_tokens(self, number: int) -> int:
        """Return the tokens before the last of the prompt."""
        return self.prompts[number] - 1

    def weights(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        """Return 1 for answers: float32 [stop - start]."""
        places = np.arange(start, stop)
        return ((places >= self.prompts[sample_id]) & (places < self.length(sample_id))).astype(np.float32)


COST = CostModel(a=1e-6, b=1e-3)
GROUPS = [(40, (5, 9, 30, 2)), (60, (8, 8)), (3, (100,)), (50, (70, 80, 60)), (12, (4, 6, 1, 9, 20, 30, 11, 2))]


def steps_of(
    num_ranks: int, most: int, rule: SharedPrompts | None, normalization: str = "documents"
) -> list[StepBatch]:
    """Return the first step of each rank."""
    source = Groups(GROUPS)
    planner = HdpPlanner(Cluster(num_ranks, most), (StageCost(COST, COST),))
    found = []
    for rank in range(num_ranks):
        settings = LoaderSettings(rank, len(source), rows_multiple=4, normalization=normalization, prompts=rule)
        loader = StepLoader(source, PlanMaker(planner), settings)
        found.append(next(loader))
        loader.close()
    return found


def losses_of(steps: Sequence[StepBatch]) -> list[tuple[Any, ...]]:
    """Return (token, label, position, weight) of each row with a loss, and the count of each row, sorted."""
    rows = []
    for step in steps:
        for packed in step.micro_batches:
            counts = packed.label_counts if packed.label_counts is not None else packed.loss_mask != 0
            columns = (packed.tokens, packed.labels, packed.positions, packed.loss_mask, counts.float())
            rows += [row for row in zip(*(column.tolist() for column in columns), strict=True) if row[3] or row[4]]
    return sorted(rows)


def num_tokens(steps: Sequence[StepBatch]) -> int:
    return sum(packed.micro_batch.num_tokens for step in steps for packed in step.micro_batches)


@pytest.mark.parametrize("normalization", ["tokens", "documents", "groups"])
@pytest.mark.parametrize(("num_ranks", "most", "widest"), [(1, 512, 1), (2, 200, 1), (4, 100, 1), (4, 100, 4)])
def test_rows_with_a_loss_are_those_of_the_copies(num_ranks: int, most: int, widest: int, normalization: str) -> None:
    copies = steps_of(num_ranks, most, None, normalization)
    shared = steps_of(num_ranks, most, SharedPrompts(most, widest, COST), normalization)
    assert losses_of(shared) == losses_of(copies)
    assert len({step.plan.lengths for step in shared}) == 1
    assert num_tokens(copies) == sum(copies[0].plan.lengths)
    saved = [
        sum(
            (len(answers) - 1) * (prompt - 1)
            for prompt, answers in GROUPS
            if len(answers) > 1 and prompt - 1 + sum(answers) + len(answers) <= limit
        )
        for limit in (most, most * widest)
    ]
    assert 0 < saved[0] <= saved[1]
    assert num_tokens(shared) in (num_tokens(copies) - saved[0], num_tokens(copies) - saved[1], num_tokens(copies))
    assert num_ranks > 1 or num_tokens(shared) == num_tokens(copies) - saved[0]
    in_rings = [shard for step in shared for row in step.plan.ranks for one in row for shard in one.shards]
    if widest > 1:
        assert num_tokens(shared) == num_tokens(copies) - saved[1]
        assert any(len(shard.ring) > 1 for shard in in_rings)


@pytest.mark.parametrize("num_answers", [8, 16])
def test_tokens_of_usual_group_sizes(num_answers: int) -> None:
    answers = tuple(np.random.default_rng(num_answers).integers(50, 400, num_answers).tolist())
    group = PlannedSequence(0, tuple(200 + answer for answer in answers), 199)
    assert group.num_tokens == 199 + sum(answers) + num_answers
    assert sum(group.lengths) - group.num_tokens == (num_answers - 1) * 199
    assert group.squares < sum(length**2 for length in group.lengths)


def test_a_plan_does_without_where_it_does_not_pay() -> None:
    """Two answers on two ranks end sooner apart: together one rank has all of the work."""
    source, rule = Groups([(20, (300, 300))]), SharedPrompts(1000, 1, COST)
    (groups,) = rule.choices(source, (0, 1), (320, 320))
    assert groups == (PlannedSequence(0, (320, 320), 19),)
    for num_ranks, pays in ((1, True), (2, False)):
        plan = plan_naive([groups[0].num_tokens], num_ranks, 1000)
        copies = HdpPlanner(Cluster(num_ranks, 1000), (StageCost(COST, COST),))([320, 320])
        assert rule.can_run(plan, groups)
        assert (rule.seconds(plan, groups) < rule.seconds(copies, None)) == pays
    assert not list(replace(rule, tokens_per_rank=400).choices(source, (0, 1), (320, 320)))


def test_slices_do_without_rings_of_groups() -> None:
    ring = plan_naive([621], 2, 400)
    groups = (PlannedSequence(0, (320, 320), 19),)
    assert not SharedPrompts(400, 1, COST).can_run(ring, groups)
    assert SharedPrompts(400, 2, COST).can_run(ring, groups)


def test_long_groups_have_rings_or_copies() -> None:
    """With rings all groups are tried first, then only the groups that fit on one rank."""
    source = Groups([(20, (300, 300)), (30, (5, 6))])
    lengths = tuple(map(source.length, range(4)))
    both, short = SharedPrompts(400, 2, COST).choices(source, (0, 1, 2, 3), lengths)
    assert [group.shared for group in both] == [19, 29]
    assert [group.shared for group in short] == [0, 0, 29]


def test_a_planner_without_time_plans_all_documents() -> None:
    """The simple plan must be equal on all ranks, whichever plan ran out of time."""

    class Late:
        calls = 0

        def __call__(self, lengths: Sequence[int], should_stop: Any = None) -> Any:
            Late.calls += 1
            if Late.calls == 2:
                raise OutOfTime("late")
            return plan_naive(lengths, 1, 512)

        def fallback(self, lengths: Sequence[int]) -> Any:
            return plan_naive(lengths, 1, 512)

    source = Groups(GROUPS)
    settings = LoaderSettings(0, len(source), prompts=SharedPrompts(512, 1, COST))
    loader = StepLoader(source, PlanMaker(Late(), plan_seconds=100.0), settings)
    step = next(loader)
    assert step.fell_back
    assert step.plan.lengths == tuple(map(source.length, range(len(source))))
    assert loader.simple_step(replace(step, fell_back=False)).plan == step.plan
    loader.close()
