"""Plans that learn in virtual time, in a few steps on two nodes."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest

from bytescale_ext.plan.cost.learned import LearnedCosts
from scripts.bench.cluster.learn import Case, always, of_bound, of_equal, over, predicted, run

pytestmark = [pytest.mark.full, pytest.mark.slow]

EQUAL = np.ones(16)
HALF = np.repeat((1.0, 0.5), 8)


def test_wrong_costs_are_corrected() -> None:
    wrong = LearnedCosts((2.0, 1.0, 1.0, 1.0, 1 / 3))
    learned, fixed = (
        run(Case(2, start, always(EQUAL), 16, learns=start is wrong)) for start in (wrong, LearnedCosts())
    )
    assert median(over(learned, fixed, 4)) < 1.02
    assert median(predicted(learned, 4)) == pytest.approx(1.0, abs=0.05)
    factors = [mine * start for mine, start in zip(learned[-1].learned.factors, wrong.factors, strict=True)]
    assert factors[0] / factors[1] < 1.2, "attention is no longer twice as slow as it is"


def test_a_slow_node_gets_less_work() -> None:
    aware, unaware = (run(Case(2, LearnedCosts(), always(HALF), 16, learns=on)) for on in (True, False))
    assert median(over(unaware, aware, 4)) > 1.3
    assert median(predicted(aware, 4)) == pytest.approx(1.0, abs=0.05)


def test_a_slow_stage_lowers_the_share_of_its_pipeline() -> None:
    speeds = np.ones((16, 2))
    speeds[5, 1] = 0.5
    steps = run(Case(2, LearnedCosts(), always(speeds), 14, stages=2))
    even = run(Case(2, LearnedCosts(), always(np.ones((16, 2))), 14, learns=False, stages=2))
    assert steps[-1].learned.speeds[5] == pytest.approx(0.5, abs=0.05)
    assert median(over(steps[:4], steps[-2:], 2)) > 1.3
    assert median(predicted(steps, 2)) == pytest.approx(1.0, abs=0.05)
    assert min(of_bound(steps, 2)) > 0.75
    assert min(of_equal(steps, even, 2)) > 0.95, "pipelines of equal stages fill and drain too"
