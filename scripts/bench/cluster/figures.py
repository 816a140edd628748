"""The figures of ``speed.py``: arms compared step by step, and the cost model held against them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypedDict

from bytescale_ext.measure.fit import rank_correlation
from scripts.bench.cluster.cases import ARMS
from scripts.bench.cluster.results import Run, Step

Arms = Mapping[str, Sequence[Run]]


class Ratio(TypedDict):
    """Ratios of the same steps."""

    median: float
    lowest: float
    highest: float


class ArmFigures(TypedDict):
    """Medians of an arm over its counted steps, and where its time went."""

    tokens_per_second: float
    megabytes_sent: float
    imbalance: float
    computing: float
    sending: float
    other: float
    waiting: float
    between_megabytes: float
    over: Ratio | None


class CaseFigures(TypedDict):
    """The arms of one case."""

    arms: dict[str, ArmFigures]
    largest_loss_difference: float


class Truth(TypedDict):
    """Predicted against measured times of steps.

    ``rank_correlation``: Spearman's, of the arms of a case; the median and the lowest over the cases.
    """

    pairs: int
    median_error: float
    worst_error: float
    rank_correlation: float | None
    lowest_rank_correlation: float | None


class Figures(TypedDict):
    """All figures: the last line of ``--json``. ``speedup``: of ours over each arm, over all steps of all cases."""

    speedup: dict[str, Ratio]
    cases: dict[str, CaseFigures]
    cost_model: Truth | None


def counted(runs: Sequence[Run]) -> list[Step]:
    """Return the steps that count: all but the first of each run."""
    return [step for run in runs for step in run.steps[1:]]


def ratios(first: Sequence[Run], other: Sequence[Run]) -> list[float]:
    """Return how many times faster one arm was than another, step by step, in the rounds that both have run."""
    pairs = zip(first, other, strict=False)
    return [
        a.tokens_per_second / b.tokens_per_second
        for mine, theirs in pairs
        for a, b in zip(mine.steps[1:], theirs.steps[1:], strict=True)
    ]


def ratio_of(found: Sequence[float]) -> Ratio:
    """Return the middle and the ends of some ratios."""
    return {"median": statistics.median(found), "lowest": min(found), "highest": max(found)}


def ratio_text(over: Ratio | None) -> str:
    """Return a ratio for a table; empty for the arm that is compared with the others."""
    return "" if over is None else f"{over['median']:.2f}x ({over['lowest']:.2f} to {over['highest']:.2f})"


def case_figures(arms: Arms) -> CaseFigures:
    """Return the figures of a case; the first arm is compared with each of the others."""
    first, *others = arms
    losses = [
        abs(a.loss - b.loss) / b.loss
        for arm in others
        for mine, theirs in zip(arms[_like(arm, arms)], arms[arm], strict=False)
        for a, b in zip(mine.steps, theirs.steps, strict=True)
    ]
    return {
        "arms": {
            arm: _arm_figures(runs, None if arm == first else ratio_of(ratios(arms[first], runs)))
            for arm, runs in arms.items()
        },
        "largest_loss_difference": max(losses, default=0.0),
    }


def _like(arm: str, arms: Arms) -> str:
    """Return the first arm with as many stages: Megatron's first weights depend on the number of stages."""
    return next(one for one in arms if ARMS[one].num_stages == ARMS[arm].num_stages)


def _arm_figures(runs: Sequence[Run], over: Ratio | None) -> ArmFigures:
    steps = counted(runs)
    split = {name: statistics.mean(run.split[name] for run in runs) for name in runs[0].split}
    return {
        "tokens_per_second": statistics.median(step.tokens_per_second for step in steps),
        "megabytes_sent": statistics.median(step.megabytes_sent for step in steps),
        "imbalance": statistics.median(step.imbalance for step in steps),
        "computing": split["computing"],
        "sending": split["sending"],
        "other": split["other"],
        "waiting": split["waiting"],
        "between_megabytes": split["between_bytes"] / 1e6,
        "over": over,
    }


def all_figures(cases: Mapping[str, Arms]) -> Figures:
    """Return the figures of all cases."""
    steps: dict[str, list[float]] = {}
    for arms in cases.values():
        first, *others = arms
        for arm in others:
            steps.setdefault(arm, []).extend(ratios(arms[first], arms[arm]))
    return {
        "speedup": {arm: ratio_of(found) for arm, found in steps.items()},
        "cases": {case: case_figures(arms) for case, arms in cases.items()},
        "cost_model": cost_model_truth(cases),
    }


def predictions(arms: Arms) -> dict[str, tuple[float, float]]:
    """Return arm -> (predicted, measured) seconds: medians over its runs, of the arms that are predicted."""
    found = {}
    for arm, runs in arms.items():
        predicted = [run.predicted_seconds for run in runs if run.predicted_seconds is not None]
        if predicted:
            found[arm] = (statistics.median(predicted), statistics.median(run.measured_seconds for run in runs))
    return found


def cost_model_truth(cases: Mapping[str, Arms]) -> Truth | None:
    """Return how well the steps were predicted; None where nothing was."""
    by_case = [predictions(arms) for arms in cases.values()]
    errors = [abs(predicted / measured - 1.0) for found in by_case for predicted, measured in found.values()]
    if not errors:
        return None
    each = [rank_correlation(list(found.values())) for found in by_case if len(found) > 2]
    correlations = [one for one in each if one is not None]
    return {
        "pairs": len(errors),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "rank_correlation": statistics.median(correlations) if correlations else None,
        "lowest_rank_correlation": min(correlations) if correlations else None,
    }


def table(title: str, figures: CaseFigures, refused: Mapping[str, str]) -> str:
    """Return the figures of a case as text."""
    lines = [
        title,
        f"{'':10}{'tokens/s':>10}{'MB sent':>10}{'between':>10}{'computing':>11}{'sending':>9}{'waiting':>9}"
        f"{'imbalance':>11}{'ours is':>24}",
    ]
    for arm, one in figures["arms"].items():
        lines.append(
            f"{arm:10}{one['tokens_per_second']:10,.0f}{one['megabytes_sent']:10.1f}{one['between_megabytes']:10.1f}"
            f"{one['computing']:11.0%}{one['sending']:9.0%}{one['waiting']:9.0%}{one['imbalance']:11.2f}"
            f"{ratio_text(one['over']):>24}"
        )
    lines += [f"{arm:10}refused: {why}" for arm, why in refused.items()]
    return "\n".join([*lines, f"losses of the arms differ by {figures['largest_loss_difference']:.1e} at most"])
