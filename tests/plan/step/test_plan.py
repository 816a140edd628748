from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.plan import StepPlan
from tests.sample import examples


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 3000), st.integers(1, 40))
def test_zigzag_covers_and_shares_evenly(length: int, width: int) -> None:
    shares = [zigzag_ranges(length, width, index) for index in range(width)]
    tokens = sorted(token for share in shares for start, stop in share for token in range(start, stop))
    assert tokens == list(range(length))
    sizes = [sum(stop - start for start, stop in share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == -(-length // width)
    for share in shares:
        assert all(start < stop for start, stop in share)
        assert list(share) == sorted(share)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 500), st.integers(2, 12))
def test_zigzag_evens_out_the_causal_triangle(multiple: int, width: int) -> None:
    length = 2 * width * multiple  # equal parts: every rank has exactly 1 / width of the pairs
    work = [
        sum((stop * (stop + 1) - start * (start + 1)) // 2 for start, stop in zigzag_ranges(length, width, index))
        for index in range(width)
    ]
    assert max(work) == min(work)


def test_zigzag_of_the_picture() -> None:
    assert [zigzag_ranges(12, 3, index) for index in range(3)] == [
        ((0, 2), (10, 12)),
        ((2, 4), (8, 10)),
        ((4, 6), (6, 8)),
    ]
    assert zigzag_ranges(7, 1, 0) == ((0, 7),)
    assert [zigzag_ranges(3, 4, index) for index in range(4)] == [((0, 1),), ((1, 2),), ((2, 3),), ()]


def test_digest_is_stable_and_sees_every_field() -> None:
    shard = Shard(0, ((0, 4),), (0,))
    plan = StepPlan(1, 4, (4,), ((MicroBatch((shard,)),),))
    assert plan.digest() == "7bfd474c10d9ecc1"  # digest of the table, equal on every machine and Python version
    others = [
        dataclasses.replace(plan, tokens_per_rank=5),
        dataclasses.replace(plan, lengths=(5,)),
        dataclasses.replace(plan, ranks=((),)),
        StepPlan(1, 4, (4,), ((MicroBatch((dataclasses.replace(shard, ring=(0, 1)),)),),)),
        StepPlan(1, 4, (4,), ((MicroBatch((dataclasses.replace(shard, inner_rings=2),)),),)),
    ]
    assert len({plan.digest(), *(other.digest() for other in others)}) == 6
