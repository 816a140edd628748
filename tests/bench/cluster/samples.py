"""Runs and results for the tests of the bench on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bytescale_ext.measure.cost_file import shipped
from scripts.bench.cluster.cases import SHORTEST, STEP_TOKENS
from scripts.bench.cluster.results import Results, Run, Step

SPLIT = {"computing": 0.5, "sending": 0.2, "other": 0.1, "waiting": 0.2, "between_bytes": 6e6}
SETTING: dict[str, float] = {"steps": 4, "seed": 0, "tokens": STEP_TOKENS, "shortest": SHORTEST}
COST = replace(shipped("bytescale_7b"), dtype="float32")


def run_of(speeds: Sequence[float], loss: float = 2.0, predicted: float | None = None, measured: float = 1.0) -> Run:
    """Return a run with these tokens per second; the first step does not count."""
    return Run(tuple(Step(speed, 3.0, 1.1, loss) for speed in speeds), dict(SPLIT), predicted, measured)


def results_of(path: Path) -> Results:
    """Return results of two cases, not written."""
    results = Results(path, dict(SETTING), COST)
    for case, arms in (
        ("byted 2x4 matched", {"ours": 30.0, "naive": 25.0, "static": 10.0, "hybrid": 20.0}),
        ("byted 2x4 slow", {"ours": 20.0, "static": 5.0}),
        ("github 1x8 matched", {"ours": 30.0, "naive": 30.0, "static": 20.0}),
    ):
        results.runs[case] = {
            arm: [run_of([1.0, speed, speed], predicted=1.05 / speed, measured=1 / speed)]
            for arm, speed in arms.items()
        }
    results.runs["byted 2x4 matched"]["packed"] = "it does not fit"
    return results
