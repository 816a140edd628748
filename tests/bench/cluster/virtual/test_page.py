"""Tables, summary and page of results in virtual time, and the options that they refuse."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.cluster.speed import build_parser
from scripts.bench.cluster.virtual.bench import CaseResult, Results
from scripts.bench.cluster.virtual.cases import ARMS, QUICK, SCALE
from scripts.bench.cluster.virtual.command import check, planned
from scripts.bench.cluster.virtual.figures import arm_figures, table
from scripts.bench.cluster.virtual.page import compared, ratios, summary, targets, text
from scripts.bench.cluster.virtual.replay import KINDS

SETTING = {"device": "H100", "source": "published timings.", "steps": 3, "seed": 0}


def arm_result(seconds: list[float], slow: list[float]) -> dict[str, Any]:
    """Return the result of an arm that computes half of its time."""
    kinds = dict.fromkeys(KINDS, 0.0)
    steps = {
        links: [{"seconds": each, "by_kind": {**kinds, "linear": each / 2, "waiting": each / 2}} for each in of_links]
        for links, of_links in (("400", seconds), ("100", slow))
    }
    result = {"losses": [5.0, 4.0], "tokens": [100, 100], "bounds": [1.0, 2.0], "minutes": 1.0, "predicted": {}}
    return {**result, "steps": steps}


def cases() -> dict[str, CaseResult]:
    arms = {"ours": arm_result([2.0, 4.0], [2.0, 4.0]), "static": arm_result([3.0, 4.0], [8.0, 20.0])}
    return {"byted": arms, "github": {"ours": arms["ours"]}}


def test_figures_compare_steps_with_ours() -> None:
    figures = arm_figures(cases()["byted"], "400")
    assert figures["static"]["over"] == (1.0, 1.25, 1.5)
    assert figures["static"]["over_bound"] == pytest.approx(2.5)
    assert figures["ours"]["share"]["computing"] == figures["ours"]["share"]["waiting"] == 0.5
    assert len(table(cases()["byted"], "100")) == 4


def test_the_summary_names_the_cases_of_the_lowest_and_highest_step() -> None:
    assert ratios(cases(), "static", "ours") == {"byted, 400 Gbit/s": [1.5, 1.0], "byted, 100 Gbit/s": [4.0, 5.0]}
    (row,) = summary(cases())[2:]
    assert "1.00 (byted, 400 Gbit/s) | 2.75 | 5.00 (byted, 100 Gbit/s) | 2" in row


def test_pipelines_are_compared_with_1f1b() -> None:
    arms = {name: arm_result([seconds, seconds], [seconds, seconds]) for name, seconds in
            (("ours", 1.0), ("stages", 3.0), ("slices", 2.0))}  # fmt: skip
    assert compared({"byted": arms})["slices", "stages"] == {
        "byted, 400 Gbit/s": [1.5, 1.5], "byted, 100 Gbit/s": [1.5, 1.5]
    }  # fmt: skip
    met = [target.is_met for target in targets({"byted": arms})]
    assert met == [True, False, False, True], "half of the time is waiting"


def test_medians_of_cases_count_on_matched_links() -> None:
    both = ({"ours": arm_result([1.0, 1.0], [1.0, 1.0]), "naive": arm_result([over, over], [1.0, 1.0])}
            for over in (1.1, 1.3))  # fmt: skip
    (naive,) = [target for target in targets(dict(zip("ab", both, strict=True))) if "naive" in target.text]
    assert naive.value == pytest.approx(1.2)
    assert naive.is_met


def test_the_page_says_that_its_figures_are_emulated(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json", SETTING, cases())
    results.write()
    page = text(Results.open(results.path, SETTING))
    assert "**emulated with device times** of an H100" in page
    assert page.count("\n## ") == 6  # how, summary, two cases at two speeds of the links


def test_results_of_another_setting_are_refused(tmp_path: Path) -> None:
    Results(tmp_path / "results.json", SETTING).write()
    with pytest.raises(ValueError, match="not of"):
        Results.open(tmp_path / "results.json", {**SETTING, "seed": 1})


def options(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["--device-times", "h100", *words])


@pytest.mark.parametrize("words", [("--rounds", "2"), ("--cases", "byted 1x8 matched"), ("--plot", "picture.png")])
def test_options_without_a_meaning_are_refused(words: tuple[str, ...]) -> None:
    check(options())
    with pytest.raises(ValueError, match="is not for --device-times"):
        check(options(*words))


def test_named_arms_run_beside_the_first() -> None:
    assert planned(quick=True, arms=["static"], has_dynamic=False)[0].arms == ("ours", "static")


def test_slices_keep_the_keys_of_every_document() -> None:
    case = QUICK[0].case
    words = ARMS["slices"].words(case)
    assert int(words[words.index("--hdp-kept-keys") + 1]) * SCALE >= case.context
    assert int(words[words.index("--hdp-tokens-per-rank") + 1]) * SCALE == 4 * case.tokens_per_rank
