from __future__ import annotations

import pytest

from bytescale_ext.plan.cost.model_cost import model_flops
from bytescale_ext.plan.search.costed import StepFigures
from bytescale_ext.plan.search.explore import ScoredStrategy, in_sizes
from bytescale_ext.plan.search.strategy import Strategy
from bytescale_ext.plan.setup.forecast import StepTime
from megatron.bytescale.cli.search.table import binds, gb_text, loses, strategy_rows
from tests.plan.search.tasks import STEPS, small_task

FAST = ScoredStrategy(
    Strategy(1, (6,), 1024), (StepFigures(StepTime(8.0, 0.1, 0.1, 0.0, 1.0), 5e8, 0.0),) * 2, small_task()
)
SLOW = ScoredStrategy(
    Strategy(2, (6,), 1024), (StepFigures(StepTime(8.0, 0.1, 3.0, 0.2, 1.0), 9.9e8, 2e9),) * 2, small_task()
)


def test_rows() -> None:
    task = small_task()
    fast, slow = strategy_rows([FAST, SLOW], peak_flops=1e9)
    assert fast.seconds == pytest.approx(8.2)
    tokens = sum(map(sum, STEPS)) / 2
    assert fast.tokens_per_second == pytest.approx(tokens / 8.2)
    flops = sum(model_flops(task.cost.shape, step) for step in STEPS) / 2
    assert fast.mfu == pytest.approx(flops / 8.2 / 1e9 / 8)
    assert (fast.device_gb, slow.host_gb) == (0.5, 2.0)
    assert (fast.binds, fast.loses) == ("computing", "")
    assert (slow.binds, slow.loses) == ("waiting, memory", "+3.1 s (waiting +2.9)")
    assert strategy_rows([FAST], None)[0].mfu is None


def test_steps_of_other_sizes_lose_by_the_time_of_as_many_documents() -> None:
    short = ScoredStrategy(
        SLOW.strategy, (StepFigures(StepTime(4.0, 0.05, 2.0, 0.1, 1.0), 5e8, 0.0),) * 4, in_sizes(small_task(), [4])[0]
    )
    fast, slow = strategy_rows([FAST, short], None)
    assert (fast.documents, slow.documents) == (8, 4)
    assert slow.loses == "+4.1 s (waiting +3.9)"
    assert slow.tokens_per_second == pytest.approx(fast.tokens_per_second * 8.2 / 12.3)


def test_what_binds_and_loses() -> None:
    parts = {"compute": 90.0, "exposed": 6.0, "idle": 2.0, "update": 2.0}
    assert binds(parts, 0.5) == "exchange"
    assert binds({**parts, "exposed": 2.0}, 0.96) == "computing, memory"
    assert loses(parts, parts) == "equal"
    assert loses({**parts, "compute": 91.0}, parts) == "+1 s (computing +1)"
    assert loses({**parts, "compute": 90.5, "idle": 1.75}, parts) == "+0.25 s (computing +0.5)"
    assert [gb_text(size) for size in (0.0, 0.0123, 81.06)] == ["0.0", "0.012", "81.1"]
