"""The summary and the two pictures at the head of docs/results/simulated.md, made from the tables of the page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bytescale_ext.draw.charts import draw_dots

HEADING, NEXT = "## Summary", "## What the figures are"
STAGES = (4, 8)
BUDGET = 80  # GB
SCHEDULERS = {"static": "static", "megatron-hybrid": "megatron-hybrid", "bytescale": "the paper's Algorithm 2",
              "ours": "ours"}  # fmt: skip
FIGURES = ("simulated/single.png", "simulated/pipelines.png")


@dataclass(frozen=True)
class Figures:
    """Mean figures of one case: time / bound by (stages, scheduler), and our speed over other schedulers."""

    case: str
    over_bound: dict[tuple[int, str], float]
    faster: dict[str, float]

    def chosen(self, num_stages: int) -> float:
        """Return time / bound of the plans chosen within the budget."""
        return self.over_bound[num_stages, "chosen"]


def read_figures(text: str) -> list[Figures]:
    """Return the figures of each case of a page. Raises ValueError if the page has no cases."""
    by_case: dict[str, Figures] = {}
    num_stages, case = 1, ""
    for line in text.splitlines():
        if heading := re.match(r"## (?:Without pipelines|(\d+) pipeline stages)", line):
            num_stages, case = int(heading[1] or 1), ""
        elif heading := re.match(r"\*\*(.+ ranks)\*\*, ", line):
            case = heading[1]
            by_case.setdefault(case, Figures(case, {}, {}))
        elif line.startswith("## "):
            case = ""
        elif case and (row := re.match(r"\| ([\w-]+) \| ([\d.]+) \(", line)):
            by_case[case].over_bound[num_stages, row[1]] = float(row[2])
            cells = line.split("|")
            if (num_stages, row[1]) == (1, "ours"):
                by_case[case].faster.update(
                    zip(SCHEDULERS, (float(cell.split()[0]) for cell in cells[3:5]), strict=False)
                )
    target = rf"\| (.+ ranks) x (\d+) stages: .* chosen within {BUDGET} GB \| .* \| ([\d.]+) \|"
    for name, stages, value in re.findall(target, text):
        by_case[name].over_bound[int(stages), "chosen"] = float(value)
    if not by_case:
        raise ValueError("the page has no table of a case")
    return list(by_case.values())


def with_summary(text: str) -> str:
    """Return the page with its summary before the explanation of its figures."""
    head, _, rest = text.partition(f"{NEXT}\n")
    head = head.partition(f"{HEADING}\n")[0]
    return head + "\n".join(summary(text)) + f"\n{NEXT}\n{rest}"


def summary(text: str) -> list[str]:
    """Return the lines of the summary."""
    targets = text.partition("## Targets\n")[2].partition("\n## ")[0]
    met, missed = targets.count("| met |"), targets.count("| **missed** |")
    lines = [
        HEADING, "",
        "*Over static* and *over megatron-hybrid*: how many times as fast our plans are. At *time / bound* 1 no plan "
        "can be faster. With pipelines, the first figure is for whole micro-batches, the second for the slices that "
        f"the planner chooses within {BUDGET} GB; it may be below 1, because the bound is the bound of 1F1B. "
        f"{met} of {met + missed} targets are met; the others are marked below. Simulated, not measured.", "",
        "| case | over static | over megatron-hybrid | time / bound | "
        + " | ".join(f"{stages} stages: 1F1B, slices" for stages in STAGES) + " |",
        "|---|---|---|---|" + "---|" * len(STAGES),
    ]  # fmt: skip
    for figures in read_figures(text):
        faster = [f"{figures.faster[other]:.2f}" for other in ("static", "megatron-hybrid")]
        piped = [f"{figures.over_bound[stages, 'ours']:.2f}, {figures.chosen(stages):.2f}" for stages in STAGES]
        lines.append(f"| {' | '.join([figures.case, *faster, f'{figures.over_bound[1, "ours"]:.3f}', *piped])} |")
    texts = ("Time of a step over the lower bound, without pipelines", "The same with pipelines")
    return [*lines, "", *(f"![{words}]({name})\n" for words, name in zip(texts, FIGURES, strict=True))]


def draw_figures(text: str, folder: Path) -> None:
    """Write the two pictures of a page below its folder."""
    (folder / FIGURES[0]).parent.mkdir(exist_ok=True)
    cases = read_figures(text)
    plain = {figures.case: [figures.over_bound[1, name] for name in SCHEDULERS] for figures in cases}
    axis = "time of a step / lower bound (1: nothing is faster)"
    arms = {name: scheduler for scheduler, name in SCHEDULERS.items()}
    draw_dots(plain, arms, folder / FIGURES[0], "without pipelines, simulated", axis)
    piped = {
        f"{figures.case}, {stages} stages": [
            *(figures.over_bound[stages, name] for name in ("static", "ours")),
            figures.chosen(stages),
        ]
        for stages in STAGES
        for figures in cases
    }
    arms = {"static": "static", "ours, whole micro-batches": "pipelines", f"ours, slices within {BUDGET} GB": "slices"}
    axis = "time of a step / lower bound of 1F1B"
    draw_dots(piped, arms, folder / FIGURES[1], "with pipelines, simulated", axis)
