"""The figures of ``speed.py``: ratios of arms step by step, and errors of the cost model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypedDict

from bytescale_ext.measure.fit import rank_correlation
from scripts.bench.cluster.cases import ARMS
from scripts.bench.cluster.results import Run, Step

Arms = Mapping[str, Sequence[Run]]


class Ratio(TypedDict):
    """Ratio of two arms over the same steps."""

    median: float
    lowest: float
    highest: float


class ArmFigures(TypedDict):
    """Medians of an arm over its counted steps, and the shares of its time."""

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
    """Figures of the arms of one case."""

    arms: dict[str, ArmFigures]
    largest_loss_difference: float


class Truth(TypedDict):
    """Errors of predicted step times; Spearman's correlation of the arms of a case, median and lowest over cases."""

    pairs: int
    median_error: float
    worst_error: float
    rank_correlation: float | None
    lowest_rank_correlation: float | None


class Figures(TypedDict):
    """All figures, as ``--json`` prints them; ``speedup``: ours over each arm, in all steps of all cases."""

    speedup: dict[str, Ratio]
    cases: dict[str, CaseFigures]
    cost_model: Truth | None


def counted(runs: Sequence[Run]) -> list[Step]:
    """Return the steps that count: all except the first of each run."""
    return [step for run in runs for step in run.steps[1:]]


def ratios(first: Sequence[Run], other: Sequence[Run]) -> list[float]:
    """Return the speed of one arm over another, step by step, in the rounds that both have run."""
    return [
        a.tokens_per_second / b.tokens_per_second
        for run, other_run in zip(first, other, strict=False)
        for a, b in zip(run.steps[1:], other_run.steps[1:], strict=True)
    ]


def ratio_of(values: Sequence[float]) -> Ratio:
    """Return the median and the extremes of some ratios."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def ratio_text(over: Ratio | None) -> str:
    """Return a ratio for a table; empty for the first arm."""
    return "" if over is None else f"{over['median']:.2f}x ({over['lowest']:.2f} to {over['highest']:.2f})"


def case_figures(arms: Arms) -> CaseFigures:
    """Return the figures of a case; the first arm is compared with each of the others."""
    first, *others = arms
    losses = [
        abs(a.loss - b.loss) / b.loss
        for arm in others
        for run, other in zip(arms[_like(arm, arms)], arms[arm], strict=False)
        for a, b in zip(run.steps, other.steps, strict=True)
    ]
    return {
        "arms": {
            arm: _arm_figures(runs, None if arm == first else ratio_of(ratios(arms[first], runs)))
            for arm, runs in arms.items()
        },
        "largest_loss_difference": max(losses, default=0.0),
    }


def _like(arm: str, arms: Arms) -> str:
    """Return the first arm with the same number of stages, which decides Megatron's initial weights."""
    return next(other for other in arms if ARMS[other].num_stages == ARMS[arm].num_stages)


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
        "speedup": {arm: ratio_of(values) for arm, values in steps.items()},
        "cases": {case: case_figures(arms) for case, arms in cases.items()},
        "cost_model": cost_model_truth(cases),
    }


def predictions(arms: Arms) -> dict[str, tuple[float, float]]:
    """Return (predicted, measured) seconds of each predicted arm, medians over its runs."""
    pairs = {}
    for arm, runs in arms.items():
        predicted = [run.predicted_seconds for run in runs if run.predicted_seconds is not None]
        if predicted:
            pairs[arm] = (statistics.median(predicted), statistics.median(run.measured_seconds for run in runs))
    return pairs


def cost_model_truth(cases: Mapping[str, Arms]) -> Truth | None:
    """Return the errors of the predicted steps; None if no step was predicted."""
    by_case = [predictions(arms) for arms in cases.values()]
    errors = [abs(predicted / measured - 1.0) for pairs in by_case for predicted, measured in pairs.values()]
    if not errors:
        return None
    of_cases = [rank_correlation(list(pairs.values())) for pairs in by_case if len(pairs) > 2]
    correlations = [correlation for correlation in of_cases if correlation is not None]
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
    for arm, row in figures["arms"].items():
        lines.append(
            f"{arm:10}{row['tokens_per_second']:10,.0f}{row['megabytes_sent']:10.1f}{row['between_megabytes']:10.1f}"
            f"{row['computing']:11.0%}{row['sending']:9.0%}{row['waiting']:9.0%}{row['imbalance']:11.2f}"
            f"{ratio_text(row['over']):>24}"
        )
    lines += [f"{arm:10}refused: {reason}" for arm, reason in refused.items()]
    return "\n".join([*lines, f"losses of the arms differ by at most {figures['largest_loss_difference']:.1e}"])
