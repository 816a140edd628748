"""Plans that learn in virtual time, in a few steps on two nodes."""

from __future__ import annotations

import pytest

from bytescale_ext.plan.cost.learned import LearnedCosts
from scripts.bench.cluster.learn import Case, equal, over, predicted, run

HALF = (1.0,) * 8 + (0.5,) * 8


def test_wrong_costs_are_corrected() -> None:
    wrong = LearnedCosts((2.0, 1.0, 1.0, 1.0, 1 / 3))
    learned, fixed = (run(Case(2, start, equal, 16, learns=start is wrong)) for start in (wrong, LearnedCosts()))
    assert over(learned, fixed, 4) < 1.02
    assert predicted(learned, 4) == pytest.approx(1.0, abs=0.05)
    factors = [mine * start for mine, start in zip(learned[-1].learned.factors, wrong.factors, strict=True)]
    assert factors[0] / factors[1] < 1.2, "attention is no longer twice as slow as it is"


def test_a_slow_node_gets_less_work() -> None:
    aware, unaware = (run(Case(2, LearnedCosts(), lambda step: HALF, 16, learns=on)) for on in (True, False))
    assert over(unaware, aware, 4) > 1.3
    assert predicted(aware, 4) == pytest.approx(1.0, abs=0.05)
