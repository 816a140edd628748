"""Figures of trainings on the emulated cluster, by hand; the trainings themselves need root."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.cluster.learn_wall import LAST, NODE, STALL, figures, gain_of, main, read_metrics


def steps(*rates: float, speeds: tuple[float, ...] = (1.0, 1.0, 0.5, 0.5)) -> list[dict[str, Any]]:
    costs = {"speeds": list(speeds)}
    return [{"tokens_per_second": rate, "predicted_over_measured": 0.9, "learned_costs": costs} for rate in rates]


def test_the_gain_of_speeds() -> None:
    assert gain_of((1.0, 1.0, 0.5, 0.5)) == 1.5
    assert gain_of((1.0, 1.0)) == 1.0


def test_steps_are_compared_one_by_one() -> None:
    slow, fast = steps(*[100.0] * 20), steps(*[100.0] * 10, *range(130, 140))
    found = figures(fast, slow, "slow_node")
    assert found["over_unaware"] == [1.34, 1.35, 1.36, 1.37, 1.38, 1.39][-LAST:]
    assert found["of_speeds"] == pytest.approx([gain / 1.5 for gain in found["over_unaware"]])
    assert found["predicted_over_measured"] == [0.9] * LAST
    assert figures(slow, fast, "wrong_costs")["over_profiled"] == found["over_unaware"]


def test_a_stall_is_judged_in_its_last_steps() -> None:
    plain, aware = steps(*[50.0] * 24), steps(*[50.0] * 11, *[100.0] * 13)
    found = figures(aware, plain, "stalled_rank")
    assert found["over_unaware"] == [2.0] * 3
    assert STALL.last == 14
    assert found["after_recovery"] == [0.5] * LAST
    assert figures(steps(*[50.0] * 24, speeds=()), plain, "stalled_rank")["of_speeds"] == [0.0]


def test_only_whole_trainings_are_read(tmp_path: Path) -> None:
    assert read_metrics(tmp_path, 2) == []
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps(1.0, 2.0))))
    assert len(read_metrics(tmp_path, 2)) == 2
    assert read_metrics(tmp_path, 3) == []


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "19"]) == 2
    assert "--steps 19: give 20 or more" in capsys.readouterr().err
    assert NODE.speed == 0.5
