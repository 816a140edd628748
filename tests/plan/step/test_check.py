"""Validator of step plans: it accepts valid plans, and refuses a violation of each rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.step.check import check_step_plan, groups_of
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.show import shard_text
from bytescale_ext.plan.step.sizes import Slicing
from tests.plan.simple_plans import plan_naive
from tests.plan.step.broken_plans import LENGTHS, MUTATIONS, Rows, good_rows, plan_of, with_uneven_ring
from tests.sample import examples


def test_the_good_plan_is_accepted() -> None:
    check_step_plan(plan_of(good_rows()), LENGTHS)
    check_step_plan(plan_of(good_rows()), list(LENGTHS), tokens_multiple=4)


def test_an_uneven_ring_is_accepted_except_in_slices_and_aligned_slots() -> None:
    rows = good_rows()
    with_uneven_ring(rows)
    plan = plan_of(rows)
    check_step_plan(plan, LENGTHS)
    assert StepPlan.from_json(plan.to_json()) == plan
    assert plan.digest() != plan_of(good_rows()).digest()
    assert "ring 0,1 with shares 4,6" in shard_text(plan.ranks[0][0].shards[0])
    for sliced in (replace(plan, aligned=True), replace(plan, slicing=Slicing(2))):
        with pytest.raises(PlanError, match="seq 0 has uneven shares"):
            check_step_plan(sliced)


@pytest.mark.parametrize(("mutate", "law"), MUTATIONS, ids=[mutate.__name__ for mutate, _ in MUTATIONS])
def test_each_broken_plan_is_refused_and_its_rows_are_marked(mutate: Callable[[Rows], None], law: str) -> None:
    """Marked rows are ranks with changed micro-batches, or ranks that share a sequence with them."""
    rows = good_rows()
    mutate(rows)
    held = [[{shard.seq for shards in rank for shard in shards} for rank in each] for each in (rows, good_rows())]
    touched = [rank for rank in range(4) if rows[rank] != good_rows()[rank]]
    changed = set().union(*(each[rank] for each in held for rank in touched))
    partners = {rank for rank in range(4) if held[0][rank] & changed}
    with pytest.raises(PlanError, match=law) as caught:
        check_step_plan(plan_of(rows))
    lines = str(caught.value).splitlines()
    assert any(line.startswith(">>") for line in lines)
    assert "micro-batch" in lines[1]
    assert lines[-1].startswith("7 sequences")
    marked = [line.split() for line in lines[1:] if line.startswith(">>")]
    assert {int(words[1]) for words in marked} <= partners | set(touched)


@settings(max_examples=examples(120), deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.data())
def test_any_moved_boundary_is_found(lengths: list[int], data: st.DataObject) -> None:
    """Every change of a single number of a plan violates a rule."""
    plan = plan_naive(lengths, 4, 15)
    rank = data.draw(st.sampled_from([rank for rank in range(4) if plan.ranks[rank]]))
    index = data.draw(st.integers(0, len(plan.ranks[rank]) - 1))
    shards = list(plan.ranks[rank][index].shards)
    place = data.draw(st.integers(0, len(shards) - 1))
    ranges = [list(pair) for pair in shards[place].ranges]
    which, end = data.draw(st.integers(0, len(ranges) - 1)), data.draw(st.integers(0, 1))
    ranges[which][end] += data.draw(st.sampled_from([-2, -1, 1, 2]))
    shards[place] = replace(shards[place], ranges=tuple((start, stop) for start, stop in ranges))
    ranks = [list(row) for row in plan.ranks]
    ranks[rank][index] = MicroBatch(tuple(shards))
    with pytest.raises(PlanError):
        check_step_plan(replace(plan, ranks=tuple(tuple(row) for row in ranks)))


def test_padding_counts_against_the_capacity() -> None:
    plan = StepPlan(1, 8, (7,), ((MicroBatch((Shard(0, ((0, 7),), (0,)),)),),))
    check_step_plan(plan, tokens_multiple=8)
    with pytest.raises(PlanError, match="not a positive multiple of 3"):
        check_step_plan(plan, tokens_multiple=3)


@pytest.mark.parametrize(
    ("change", "lengths", "law"),
    [
        ({"num_ranks": 5}, None, "for 5 ranks and lists micro-batches of 4"),
        ({"tokens_per_rank": 0}, None, "C = 0"),
        ({"lengths": (10, 3, 9, 2, 4, 12, 0)}, None, "seq 6 has 0 tokens"),
        ({}, (10, 3, 9, 2, 4, 12), "the plan has 7 sequences, the step has 6"),
        ({}, (10, 3, 9, 2, 5, 12, 4), "seq 4 has 4 tokens in the plan and 5 in the step"),
    ],
)
def test_faults_of_the_whole_plan_are_marked_too(
    change: dict[str, int], lengths: tuple[int, ...] | None, law: str
) -> None:
    with pytest.raises(PlanError, match=law) as caught:
        check_step_plan(replace(plan_of(good_rows()), **change), lengths)  # type: ignore[arg-type]
    assert str(caught.value).startswith(">>")


def test_the_message_of_a_large_plan_stays_short() -> None:
    plan = plan_naive([8] * 2000, 50, 8)
    ranks = list(plan.ranks)
    ranks[31] = (ranks[31][0], MicroBatch(ranks[31][1].shards * 2), *ranks[31][2:])
    with pytest.raises(PlanError) as caught:
        check_step_plan(replace(plan, ranks=tuple(ranks)))
    lines = str(caught.value).splitlines()
    assert len(lines) <= 46
    assert [line.split()[1:3] for line in lines if line.startswith(">>")] == [["31", "1"]]


def test_coupled_groups_of_the_good_plan() -> None:
    assert groups_of(plan_of(good_rows())) == [[0, 1], [0, 1], [1, 2], [3, 2]]


def aligned_plan(rows: Rows) -> StepPlan:
    return replace(plan_of(rows), aligned=True)


def test_aligned_slots_may_be_empty_and_must_agree() -> None:
    rows = good_rows()  # ranks 0 and 1 have seq 2 at index 1, rank 2 at index 0
    with pytest.raises(PlanError, match="seq 2 is in micro-batch 1 on rank 1 and 0 on rank 2; aligned slots"):
        check_step_plan(aligned_plan(rows))
    rows[2].insert(0, [])
    with pytest.raises(PlanError, match="seq 5 is in micro-batch 2 on rank 2 and 1 on rank 3; aligned slots"):
        check_step_plan(aligned_plan(rows))
    rows[3].insert(1, [])
    check_step_plan(aligned_plan(rows))
    with pytest.raises(PlanError, match="rank 2 micro-batch 0 is empty"):
        check_step_plan(plan_of(rows))


def test_offloading_counts_the_tokens_that_stay() -> None:
    """Rank 0's first micro-batch has 16 tokens for C = 8. So 2 + 8 (1 - r) of 10 layers may keep half: r = 5 / 8."""
    shards = (Shard(0, ((0, 16),), (0,)),)

    def check(offload: float, num_layers: int | None) -> None:
        plan = StepPlan(1, 8, (16,), ((MicroBatch(shards, offload),),))
        check_step_plan(plan, [16], 4, num_layers)

    check(0.625, 10)
    for offload, layers, words in [
        (0.62, 10, "16 tokens .* of which 8 stay on the device, more than C = 8"),
        (0.0, 10, "16 tokens .16 padded., more than C = 8"),
        (0.625, None, "rank 0 micro-batch 0 offloads 0.625 .*the number of layers is not given"),
        (1.0, 2, "more than C = 8"),
        (1.1, 10, "offloads 1.1 .*outside 0 to 1"),
        (-0.1, 10, "offloads -0.1 .*outside 0 to 1"),
        (float("nan"), 10, "offloads nan"),
    ]:
        with pytest.raises(PlanError, match=words):
            check(offload, layers)


def test_plans_kept_as_arrays_are_checked_as_arrays() -> None:
    plan = plan_naive(list(range(1, 400)), 16, 64)
    check_step_plan(plan)
    assert isinstance(plan.ranks, PlacedRanks)
    outside = plan.ranks.first_ranks.copy()
    outside[398] = 10  # 399 tokens need seven ranks
    with pytest.raises((PlanError, IndexError)):
        check_step_plan(replace(plan, ranks=replace(plan.ranks, first_ranks=outside)))
    together = np.zeros_like(plan.ranks.orders)
    with pytest.raises(PlanError, match="more than C = 64"):
        check_step_plan(replace(plan, ranks=replace(plan.ranks, orders=together)))


def hierarchical_plan(first: int, width: int, inner_rings: int) -> StepPlan:
    """Return a plan with one sequence on a hierarchical ring of 12 ranks."""
    ring = tuple(range(first, first + width))
    shards = {rank: Shard(0, zigzag_ranges(24, width, rank - first), ring, inner_rings) for rank in ring}
    ranks = tuple((MicroBatch((shards[rank],)),) if rank in shards else () for rank in range(12))
    return StepPlan(12, 24, (24,), ranks)


def test_inner_rings_lie_inside_nodes() -> None:
    for first, width, inner_rings in ((0, 8, 2), (4, 8, 2), (0, 12, 3), (2, 4, 2), (2, 10, 5), (0, 6, 3)):
        check_step_plan(hierarchical_plan(first, width, inner_rings), ranks_per_node=4)
    for first, width, inner_rings in ((2, 8, 2), (1, 4, 2), (1, 6, 2), (0, 6, 2), (3, 6, 2)):
        with pytest.raises(PlanError, match="inner rings do not tile nodes of 4 ranks"):
            check_step_plan(hierarchical_plan(first, width, inner_rings), ranks_per_node=4)
    with pytest.raises(PlanError, match="inner rings do not tile the ranks"):
        check_step_plan(hierarchical_plan(1, 4, 2))
    check_step_plan(hierarchical_plan(1, 8, 1), ranks_per_node=4)
