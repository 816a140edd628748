"""Figures of the bench on a cluster: arms compared step by step, errors of the cost model, the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.cluster.figures import all_figures, case_figures, cost_model_truth, table
from tests.bench.cluster.samples import results_of, run_of


def test_speeds_are_compared_step_by_step_without_the_first() -> None:
    ours = [run_of([1.0, 30.0, 60.0]), run_of([2.0, 45.0])]
    figures = case_figures({"ours": ours, "static": [run_of([99.0, 20.0, 30.0], loss=2.5), run_of([9.0, 30.0])]})
    assert figures["arms"]["ours"] == {
        "tokens_per_second": 45.0, "megabytes_sent": 3.0, "imbalance": 1.1, "computing": 0.5, "sending": 0.2,
        "other": 0.1, "waiting": 0.2, "between_megabytes": 6.0, "over": None,
    }  # fmt: skip
    assert figures["arms"]["static"]["over"] == {"median": 1.5, "lowest": 1.5, "highest": 2.0}
    assert figures["largest_loss_difference"] == pytest.approx(0.2)


def test_losses_are_compared_between_arms_with_the_same_number_of_stages() -> None:
    arms = {
        arm: [run_of([1.0, 2.0], loss=loss)]
        for arm, loss in (("ours", 2.0), ("naive", 2.2), ("pipelines", 3.0), ("slices", 3.0))
    }
    assert case_figures(arms)["largest_loss_difference"] == pytest.approx(0.2 / 2.2)


def test_one_arm_is_compared_with_nothing() -> None:
    figures = all_figures({"a case": {"ours": [run_of([1.0, 2.0])]}})
    assert figures["speedup"] == {}
    assert figures["cost_model"] is None
    assert figures["cases"]["a case"]["largest_loss_difference"] == 0.0


def test_the_last_line_has_the_ratios_of_all_cases(tmp_path: Path) -> None:
    figures = all_figures(results_of(tmp_path / "results.json").cases())
    assert figures["speedup"]["static"] == {"median": 3.0, "lowest": 1.5, "highest": 4.0}
    assert figures["speedup"]["naive"]["lowest"] == 1.0
    assert list(figures["cases"]) == ["byted 2x4 matched", "byted 2x4 slow", "github 1x8 matched"]


def test_errors_of_predicted_steps() -> None:
    arms = {
        "ours": [run_of([1.0, 2.0], predicted=1.0, measured=1.0)],
        "naive": [run_of([1.0, 2.0], predicted=3.3, measured=3.0)],
        "static": [run_of([1.0, 2.0], predicted=1.5, measured=2.0), run_of([1.0, 2.0], predicted=1.5, measured=3.0)],
        "eager": [run_of([1.0, 2.0])],
    }
    truth = cost_model_truth({"a case": arms})
    assert truth is not None
    assert (truth["pairs"], truth["worst_error"]) == (3, pytest.approx(0.4))
    assert truth["median_error"] == pytest.approx(0.1)
    assert truth["rank_correlation"] == pytest.approx(1.0)


def test_the_table() -> None:
    figures = case_figures({"ours": [run_of([1.0, 3000.0])], "static": [run_of([1.0, 2000.0])]})
    title, names, ours, static, packed, losses = table("byted 2x4 slow", figures, {"packed": "no room"}).splitlines()
    assert title == "byted 2x4 slow"
    assert names.split()[-2:] == ["ours", "is"]
    assert ours.split() == ["ours", "3,000", "3.0", "6.0", "50%", "20%", "20%", "1.10"]
    assert static.split()[-4:] == ["1.50x", "(1.50", "to", "1.50)"]
    assert packed.split() == ["packed", "refused:", "no", "room"]
    assert losses == "losses of the arms differ by at most 0.0e+00"
