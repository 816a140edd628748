"""Detection of slow ranks: with equal work, against the median of the others, without effect of outliers."""

from __future__ import annotations

import math

from bytescale_ext.measure.stragglers import (
    FEWEST_PASSES,
    FEWEST_SECONDS,
    SLOW_FACTOR,
    PaceMeter,
    Straggler,
    counts_for_pace,
    find_stragglers,
)
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard

HOSTS = ("a", "a", "b", "b")


def window(*passes: tuple[float, float]) -> PaceMeter:
    found = PaceMeter()
    for work, seconds in passes:
        found.add(work, seconds)
    return found


def test_a_pace_needs_some_passes_and_some_time() -> None:
    assert math.isnan(window(*[(2.0, 1.0)] * (FEWEST_PASSES - 1)).seconds_per_work())
    assert window(*[(2.0, 1.0)] * FEWEST_PASSES).seconds_per_work() == 0.5
    short = FEWEST_SECONDS / 64
    assert math.isnan(window(*[(2.0, short)] * 63).seconds_per_work())
    assert window(*[(2.0, short)] * 64).seconds_per_work() == short / 2


def test_a_pace_forgets_old_passes() -> None:
    found = window(*[(2.0, 1.0)] * 20, *[(2.0, 4.0)] * FEWEST_PASSES)
    assert found.seconds_per_work() == 2.0
    assert (len(found.passes), found.seconds) == (FEWEST_PASSES, 4.0 * FEWEST_PASSES)


def test_outliers_and_small_passes_do_not_move_a_pace() -> None:
    usual = [(10.0, 1.0)] * 8
    assert window((10.0, 99.0), (10.0, 99.0), *usual[2:]).seconds_per_work() == 0.1
    assert window(*usual[:4], *[(0.1, 1.0)] * 4).seconds_per_work() == 0.1


def test_half_a_second_on_a_busy_processor_is_not_slow() -> None:
    """Passes of two ranks take 10 ms, but one rank is 2.2 times slower for half a second, as was measured."""
    calm, busy = [(1.0, 0.010)] * 300, [(1.0, 0.022)] * 23
    paces = {0: window(*calm).seconds_per_work(), 1: window(*calm, *busy).seconds_per_work()}
    assert find_stragglers(paces, HOSTS) == ()
    slow = window(*calm, *busy * 6).seconds_per_work()
    assert [one.rank for one in find_stragglers({0: paces[0], 1: slow}, HOSTS)] == [1]


def test_a_rank_is_slow_beside_the_median_of_the_others() -> None:
    assert find_stragglers({0: 1.0, 1: 1.1, 2: 0.9, 3: 3.0}, HOSTS) == (Straggler(3, "b", 3.0),)
    assert find_stragglers({0: 1.0, 1: 1.0, 2: 0.99 * SLOW_FACTOR, 3: 1.0}, HOSTS) == ()
    assert find_stragglers({0: 1.0, 1: 1.0, 2: SLOW_FACTOR, 3: 1.0}, HOSTS) == (Straggler(2, "b", SLOW_FACTOR),)
    assert find_stragglers({0: math.nan, 3: 3.0}, HOSTS) == ()  # no other rank has a pace


def test_rings_and_small_micro_batches_do_not_count() -> None:
    alone, shared = Shard(0, ((0, 40),), (1,)), Shard(1, ((0, 40),), (0, 1))
    assert counts_for_pace(MicroBatch((alone,)), 80)
    assert not counts_for_pace(MicroBatch((alone,)), 82)
    assert not counts_for_pace(MicroBatch((shared, alone)), 80)
    assert not counts_for_pace(MicroBatch(()), 80)
