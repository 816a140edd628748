"""Slices of micro-batches: every token once, equal on all ranks of a ring, and of equal cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.schedule.actions import seq1f1b_schedule
from bytescale_ext.plan.schedule.document_slices import DocumentSlices, SliceRule, affordable_tokens, kept_bytes
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.sizes import Slicing

COST = CostModel(0.1, 1.0)


def local(seq: int, length: int) -> Shard:
    return Shard(seq, ((0, length),), (0,))


def ranges_of(pieces: Sequence[MicroBatch], seq: int) -> list[tuple[int, int]]:
    return sorted(pair for piece in pieces for shard in piece.shards if shard.seq == seq for pair in shard.ranges)


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_slices_hold_every_token_once_and_cost_the_same(multiple: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        width, num_slices = int(rng.integers(2, 6)), int(rng.integers(1, 7))
        lengths = [int(rng.integers(width, 9000)), *rng.integers(1, 700, size=int(rng.integers(0, 9))).tolist()]
        ring, rule = tuple(range(width)), SliceRule(Slicing(num_slices), COST, multiple)
        documents = tuple(local(seq, lengths[seq]) for seq in range(1, len(lengths)))
        held = [
            MicroBatch((Shard(0, zigzag_ranges(lengths[0], width, rank), ring), *(documents if not rank else ())))
            for rank in ring
        ]
        cuts = [rule(micro_batch, lengths) for micro_batch in held]
        assert len({cut.ring_ends for cut in cuts}) == 1  # the ring's ranks agree
        pieces = [[cut.slice(index, rank) for index in range(num_slices)] for rank, cut in enumerate(cuts)]
        for seq, length in enumerate(lengths):
            found = ranges_of([piece for one in pieces for piece in one], seq)
            assert found[0][0] == 0
            assert found[-1][1] == length
            assert all(first[1] == second[0] for first, second in itertools.pairwise(found))
        for micro_batch, one in zip(held, pieces, strict=True):  # no rank holds more than without slices
            assert sum(piece.num_tokens for piece in one) == micro_batch.num_tokens
        if sum(lengths[1:]) > 200 * num_slices:
            assert all(piece.num_tokens % multiple == 0 for piece in pieces[0][:-1])
        if lengths[0] > 2000 and num_slices > 1:
            spans = [cuts[0].ring_range(0, index) for index in range(num_slices)]
            costs = [COST.a * (b * b - a * a) + COST.b * (b - a) for a, b in spans]
            one_grain = 2 * multiple * width * (2 * COST.a * lengths[0] + COST.b)
            assert max(costs) - min(costs) <= 2 * one_grain


def test_local_documents_make_up_the_row_multiple() -> None:
    """Ring tokens and local tokens of a slice sum to a multiple, if there are enough local tokens."""
    ring = (0, 1)
    held = MicroBatch((Shard(0, zigzag_ranges(90, 2, 0), ring), local(1, 31)))
    cut = SliceRule(Slicing(2), None, 8)(held, (90, 31))
    assert cut.ring_ends == ((32, 90),)
    assert cut.slice(0, 0).num_tokens == 16 + cut.local_ends[0] == 32


def test_one_slice_is_the_micro_batch_and_short_ones_leave_slices_empty() -> None:
    held = MicroBatch((Shard(0, zigzag_ranges(9, 2, 0), (0, 1)), local(1, 3)))
    assert SliceRule(Slicing(1), COST)(held, (9, 3)).slice(0, 0) == held
    cut = SliceRule(Slicing(6), COST)(held, (9, 3))
    assert cut.num_slices == 6
    assert sum(cut.slice(index, 0).num_tokens for index in range(6)) == held.num_tokens
    assert any(not cut.slice(index, 0).shards for index in range(6))
    empty = SliceRule(Slicing(3), COST)(MicroBatch(()), ())
    assert empty == DocumentSlices(MicroBatch(()), (), (0, 0, 0))


def test_keys_of_sequences_up_to_a_length_are_kept() -> None:
    ring = (0, 1)
    held = MicroBatch((Shard(0, zigzag_ranges(90, 2, 0), ring), Shard(1, zigzag_ranges(40, 2, 0), ring), local(2, 9)))
    kept = [SliceRule(Slicing(2, most), COST)(held, (90, 40, 9)).kept for most in (0, 39, 40, 90)]
    assert kept == [frozenset(), frozenset(), {1}, {0, 1}]


def test_kept_keys_take_no_more_memory_than_1f1b() -> None:
    """4 stages with 4 slices store 7/4 C instead of 4 C, and float32 sums of 3/4 C.

    Kept keys are in 7 slices, sums in 3.
    """
    kept = affordable_tokens(4, Slicing(4), 1000, 170.0, 5.0)
    assert kept == int((2.25 * 1000 * 170 - 1.5 * 1000 * 5) / (7 / 4 * 5 + 1.5 * 5))
    eager = affordable_tokens(4, Slicing(4, eager=True), 1000, 170.0, 5.0)  # 10/4 C
    assert eager == int((1.5 * 1000 * 170 - 1.5 * 1000 * 5) / (10 / 4 * 5 + 1.5 * 5))
    assert affordable_tokens(4, Slicing(2, eager=True), 1000, 170.0, 5.0) == 0  # 8 slices are 4 micro-batches
    assert affordable_tokens(4, Slicing(1), 1000, 170.0, 5.0) == 0  # nothing is freed
    assert affordable_tokens(1, Slicing(4), 1000, 170.0, 5.0) == 0
    assert affordable_tokens(8, Slicing(8), 1000, 170.0, 5.0) > kept


@pytest.mark.parametrize(("num_stages", "eager"), [(2, False), (4, False), (7, False), (4, True), (8, True)])
@pytest.mark.parametrize("num_slices", [2, 3, 8, 12])
def test_what_the_first_stage_holds_is_that_of_its_schedule(num_stages: int, num_slices: int, eager: bool) -> None:
    """The rule counts slice by slice: kept keys of 1 byte in each slice, and sums of 2 bytes."""
    slicing = Slicing(num_slices, eager=eager)
    begun: set[tuple[int, int]] = set()
    summed, most = 0, 0.0
    for action in seq1f1b_schedule(num_stages, 12, slicing).stages[0]:
        if action.kind == "F":
            begun.add((action.micro_batch, action.slice_index))
        else:
            begun.remove((action.micro_batch, action.slice_index))
            summed = action.slice_index  # all slices before it have sums
        most = max(most, (len(begun) + 2 * summed) / num_slices)
    assert kept_bytes(num_stages, slicing, 2520, 1.0) == pytest.approx(2520 * most)
