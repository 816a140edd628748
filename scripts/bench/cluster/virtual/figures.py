"""Figures of the results of ``speed.py --device-times``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from scripts.bench.cluster.virtual.bench import CaseResult
from scripts.bench.cluster.virtual.cases import ARMS
from scripts.bench.cluster.virtual.replay import COMPUTING


def arm_figures(arms: CaseResult, links: str) -> dict[str, dict[str, Any]]:
    """Return the figures of each arm of a case at one speed of the links.

    ``seconds``: median step; ``over``: lowest, median and highest speed-up of ours, step by step; ``share``: shares of
    the time by kind, over all steps; ``over_bound``: median time over the bound, without pipelines.
    """
    ours = next(iter(arms.values()))["steps"][links]
    figures = {}
    for name, arm in arms.items():
        steps = arm["steps"][links]
        seconds = [step["seconds"] for step in steps]
        ratios = sorted(mine / own["seconds"] for mine, own in zip(seconds, ours, strict=True))
        kinds = {kind: sum(step["by_kind"][kind] for step in steps) / sum(seconds) for kind in steps[0]["by_kind"]}
        kinds = {"computing": sum(kinds.pop(kind) for kind in COMPUTING), **kinds}
        bounds = [mine / least for mine, least in zip(seconds, arm["bounds"], strict=True)]
        figures[name] = {
            "seconds": statistics.median(seconds),
            "tokens_per_second": sum(arm["tokens"]) / sum(seconds),
            "over": (ratios[0], statistics.median(ratios), ratios[-1]),
            "share": kinds,
            "over_bound": statistics.median(bounds),
        }
    return figures


def table(arms: CaseResult, links: str) -> list[str]:
    """Return the lines of the table of a case at one speed of the links."""
    figures = arm_figures(arms, links)
    kinds = list(next(iter(figures.values()))["share"])
    lines = [
        f"| arm | seconds a step | ours is (lowest to highest) | time / bound | {' | '.join(kinds)} |",
        "|" + "---|" * (4 + len(kinds)),
    ]
    for number, (name, row) in enumerate(figures.items()):
        low, median, high = row["over"]
        over = f"{median:.2f}x ({low:.2f} to {high:.2f})" if number else ""
        shares = " | ".join(f"{row['share'][kind]:.1%}" for kind in kinds)
        lines.append(f"| {ARMS[name].title} | {row['seconds']:.2f} | {over} | {row['over_bound']:.3f} | {shares} |")
    return lines


def all_figures(cases: Mapping[str, CaseResult]) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Return the figures of all cases: case -> links -> arm -> figures."""
    return {
        case: {links: arm_figures(arms, links) for links in next(iter(arms.values()))["steps"]}
        for case, arms in cases.items()
    }
