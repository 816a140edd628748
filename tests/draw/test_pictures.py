"""Every picture is drawn, even of minimal input, and empty input is refused with its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale_ext.draw import activations
from bytescale_ext.draw.activations import draw_policies
from bytescale_ext.draw.charts import draw_bars, draw_dots, draw_hit_rates, draw_loads, draw_loss, running_mean
from bytescale_ext.draw.schedule import draw_schedule
from bytescale_ext.draw.sculpt import draw_clusters, principal_components
from bytescale_ext.draw.search import draw_strategies, frontier
from bytescale_ext.draw.states import draw_moves
from bytescale_ext.draw.timeline import draw_timeline
from bytescale_ext.measure.timeline import Phase, phases_of_plan
from bytescale_ext.plan.activation.forecast import ActivationForecast
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.schedule.actions import seq1f1b_schedule
from bytescale_ext.plan.schedule.simulate import simulate_slices
from bytescale_ext.plan.states.pages import StateTensor, lay_out
from bytescale_ext.plan.states.timeline import Speeds, time_moves
from tests.plan.simple_plans import plan_naive

ROW = ActivationForecast(
    transfer_seconds=0.1, recompute_seconds=0.1, step_seconds=1.0, device_bytes=5e9, host_bytes=0.0
)
POLICIES = [(8192, "none", ROW), (8192, "memo", ROW), (16384, "none", None), (16384, "memo", ROW), (8192, "auto", None)]
FOUND = [(3.0, 10.0, "a"), (2.0, 20.0, "b"), (2.5, 30.0, "c"), (1.0, 40.0, "d"), (3.5, 10.0, "e")]
VECTORS = np.random.RandomState(0).standard_normal((600, 5)).astype(np.float32)
PAGES = lay_out([StateTensor("a", 64, 0, True)], 32)
SPANS = phases_of_plan(plan_naive([70, 30, 5, 4, 9], 4, 20), CostModel(a=0.01, b=1.0))
STEP = [Phase(0, 3, kind, None, 80.0 + at, 81.0 + at) for at, kind in enumerate(("wait", "reduce", "optimizer"))]
SIMULATED = simulate_slices(seq1f1b_schedule(2, 4), lambda stage, action: 1.0)

Draw = Callable[[Path], None]
PICTURES: dict[str, Draw] = {
    "policies": partial(draw_policies, POLICIES),
    "loss": partial(draw_loss, range(200), [3.0 / (step + 1) for step in range(200)]),
    "one loss": partial(draw_loss, range(1), [3.0]),
    "bars": lambda path: draw_bars({"ours": (1.0, 1.5), "static": (2.0, 2.5)}, path, "title", "time / bound"),
    "dots": lambda path: draw_dots(
        {"case": [1.0, 2.0]}, {"ours": "ours", "static": "static"}, path, "title", "time / bound"
    ),
    "loads": lambda path: draw_loads(np.arange(24).reshape(4, 6), {"static": np.ones(4)}, path, "layer 2"),
    "hit rates": lambda path: draw_hit_rates({"lru": [(0.5, 0.9), (0.1, 0.4)], "lfu": [(0.1, 0.5)]}, path, "rows"),
    "clusters": partial(draw_clusters, VECTORS, np.arange(600) % 30, np.full(600, 9)),
    "one document": partial(draw_clusters, VECTORS[:1], np.zeros(1, dtype=np.int64), np.array([4])),
    "strategies": lambda path: draw_strategies(FOUND, [(5.0, 8.0)], path, "strategies"),
    "one strategy": lambda path: draw_strategies(FOUND[:1], [], path, "one"),
    "moves": lambda path: draw_moves(time_moves(PAGES, 2, Speeds(10.0, 30.0)), path, "one step"),
    "moves of a disk": lambda path: draw_moves(
        time_moves(PAGES, 2, Speeds(10.0, 30.0, 9.0, 6.0), {1, 3, 5}), path, "one step"
    ),
    "schedule": lambda path: draw_schedule(SIMULATED, path, "title"),
    "step": lambda path: draw_timeline([*SPANS, *STEP], path, "four ranks"),
    "padding": lambda path: draw_timeline([Phase(0, 0, "forward", 0, 0.0, 1.0)], path, "padding"),
}
NOTHING: dict[str, Draw] = {
    "no policy fits": partial(draw_policies, [(8192, "none", None)]),
    "0 steps and 0 losses": partial(draw_loss, [], []),
    "2 steps and 1 losses": partial(draw_loss, [1, 2], [3.0]),
    "no bars": lambda path: draw_bars({}, path, "title", "time / bound"),
    "no rows": lambda path: draw_dots({}, {"ours": "ours"}, path, "title", "time / bound"),
    "no hit rates": lambda path: draw_hit_rates({"lru": []}, path, "rows"),
    "no strategies": lambda path: draw_strategies([], [], path, "none"),
    "no moves to draw": lambda path: draw_moves((), path, "none"),
    "no phases": lambda path: draw_timeline([], path, "none"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_it_is_drawn(name: str, tmp_path: Path) -> None:
    PICTURES[name](tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("message", NOTHING)
def test_nothing_is_not_drawn(message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        NOTHING[message](tmp_path / "picture.png")


@pytest.mark.slow
def test_times_of_policies_are_drawn_beside_the_fastest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, list[tuple[float, float]]]] = []
    draw_line = activations.draw_line

    def note(axes: Any, style: Any, points: Sequence[tuple[float, float]], label: str) -> None:
        drawn.append((label, [(round(x, 6), round(y, 6)) for x, y in points]))
        draw_line(axes, style, points, label)

    monkeypatch.setattr(activations, "draw_line", note)
    slow = replace(ROW, step_seconds=1.25)
    rows = [(8192, "none", ROW), (8192, "memo", slow), (16384, "none", None), (16384, "memo", slow)]
    draw_policies(rows, tmp_path / "policies.png")
    assert drawn[:2] == [("none", [(-0.15, 0.0)]), ("memo", [(0.15, 25.0), (1.15, 0.0)])]
    assert drawn[2:4] == [("none", [(-0.15, 5.0)]), ("memo", [(0.15, 5.0), (1.15, 5.0)])]


def test_a_running_mean_begins_with_the_values_there_are() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], 3) == [1.0, 2.0, 3.0, 5.0]


def test_the_plane_of_clusters_shows_the_largest_differences() -> None:
    vectors = np.array([[0, 0, 3.0], [0, 0, -3], [1, 0, 0], [-1, 0, 0]])
    assert np.allclose(np.abs(principal_components(vectors)), [[3, 0], [3, 0], [0, 1], [0, 1]])


def test_the_frontier_of_strategies_gains_time_for_memory() -> None:
    assert [name for _, _, name in frontier(FOUND)] == ["a", "b", "d"]
