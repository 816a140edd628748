from __future__ import annotations

import pytest

from bytescale_ext.plan.search.space import Space
from bytescale_ext.plan.search.strategy import FULL, KEEP
from megatron.bytescale.cli.search.verify import Verified
from scripts.bench.search.truth import fastest_of_kinds, kind, spread, summary
from tests.plan.search.tasks import random_task

ROWS = [
    Verified(1, "tp 1", 1.0, 2.0, 1.25, 2.5),
    Verified(2, "tp 2", 1.1, 2.0, failure="no --lr"),
    Verified(3, "tp 4", 1.2, 4.0, 1.0, 5.0),
]


def test_kinds_are_from_fast_to_slow_and_the_fastest_is_first() -> None:
    found = fastest_of_kinds(random_task(0), Space(stages=(1,), activations=(KEEP, FULL)))
    assert len({kind(one.strategy) for one in found}) == len(found) > 5
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    chosen = spread(found, 5)
    assert len(chosen) == 5
    assert (chosen[0], chosen[-1]) == (found[0], found[-1])
    assert spread(found[:3], 5) == found[:3]


def test_what_failed_does_not_count() -> None:
    found = summary(ROWS)
    assert found["strategies"] == 2
    assert found["choice_over_best"] == 1.25
    assert found["rank_correlation"] == pytest.approx(-1.0)
    assert found["worst_memory_error"] == pytest.approx(0.2)
    assert found["median_time_error"] == pytest.approx(0.2)
    with pytest.raises(ValueError, match="no strategy ran"):
        summary(ROWS[1:2])


def test_without_the_choice_there_is_no_ratio() -> None:
    assert summary(ROWS[2:])["choice_over_best"] is None
