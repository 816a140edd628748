"""Write docs/results/measured.md and its pictures (docs/results/measured) from the results of ``speed.py``.

.venv/bin/python scripts/bench/cluster/page.py [--results runs/cluster/results.json] [--output docs/results/measured.md]

The script takes a few seconds.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.draw.figure import ARMS as ARM_STYLES
from bytescale_ext.draw.figure import (
    INK,
    draw_line,
    draw_times,
    name_rows,
    new_figure,
    save,
    set_grid,
    set_legend,
    set_title,
)
from bytescale_ext.new_file import write_text
from scripts.bench.cluster.cases import (
    ARMS,
    CONTEXT,
    FULL,
    LINKS,
    QUICK,
    SCALE,
    SHORTEST,
    STEP_TOKENS,
    Case,
)
from scripts.bench.cluster.figures import (
    Arms,
    CaseFigures,
    Truth,
    case_figures,
    cost_model_truth,
    predictions,
    ratio_text,
)
from scripts.bench.cluster.results import Results
from scripts.bench.report import ROOT, Target
from scripts.cluster.spec import SPECS, matched_links

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPEC = "H200-IB"
_KINDS = ("computing", "sending", "other", "waiting")


def targets(cases: Mapping[str, CaseFigures], truth: Truth | None) -> list[Target]:
    """Return the targets; ``cases`` has the figures by name, ``truth`` the errors of the cost model."""

    def over(arm: str, names: Sequence[str]) -> list[float]:
        ratios = [cases[name]["arms"][arm]["over"] for name in names if arm in cases[name]["arms"]]
        return [ratio["median"] for ratio in ratios if ratio is not None]

    matched = [name for name in cases if Case.parse(name).link == "matched" and Case.parse(name).context == CONTEXT]
    long = [name for name in matched if Case.parse(name).sampler in ("byted", "github")]
    others = {name for name, arm in ARMS.items() if arm.num_stages == 1} - {"plain"}  # often equal to ours
    every = [ratio for arm in others for ratio in over(arm, list(cases))]
    of_speed = [
        Target("ours over static, Byted and GitHub, matched links, lowest case",
               min(over("static", long), default=None), 2.5),
        Target("ours over naive, matched links, lowest case", min(over("naive", matched), default=None), 1.1),
        Target("ours over Megatron's hybrid plan, matched links, lowest case",
               min(over("hybrid", matched), default=None), 1.1),
        Target("ours over any other way without pipelines, lowest case", min(every, default=None), 1.0),
    ]  # fmt: skip
    if truth is None:
        return of_speed
    return [
        *of_speed,
        Target("pairs of predicted and measured steps", truth["pairs"], 24),
        Target("median error of the prediction", truth["median_error"], 0.1, at_most=True),
        Target("worst error of the prediction", truth["worst_error"], 0.2, at_most=True),
        Target("rank correlation of the arms of a case, median", truth["rank_correlation"], 0.9),
    ]


def page(results: Results) -> str:
    """Return the page."""
    cases = results.cases()
    figures = {name: case_figures(arms) for name, arms in cases.items()}
    truth = cost_model_truth(cases)
    rows = [target.row for target in targets(figures, truth)]
    detailed = in_detail(figures)
    parts = [
        head(results),
        "## Targets\n\n| figure | target | reached | |\n|---|---|---|---|\n" + "\n".join(rows),
        summary(figures),
        "## Speed against links\n\n![How many times as fast ours is, against the speed of links](measured/speed.png)",
        "## Where the time goes\n\n![Shares of the ranks' time](measured/time.png)\n\nProcessor time over a rank's "
        "share of a core: *computing* in its main thread, *sending* in the threads that carry messages, *other* in "
        "planning and loading. The rest is *waiting*: for a ring, for other ranks at the end of the step, for a "
        "barrier.",
        "## Bytes between nodes\n\n![Megabytes that cross nodes in a step](measured/bytes.png)",
        *(case_section(name, case, results.refused(name)) for name, case in detailed.items()),
        cost_section(cases),
    ]
    return "\n\n".join(parts) + "\n"


def in_detail(figures: Mapping[str, CaseFigures]) -> dict[str, CaseFigures]:
    """Return the cases with tables and bars: the cases with matched links."""
    return {name: case for name, case in figures.items() if Case.parse(name).link == "matched"}


def summary(figures: Mapping[str, CaseFigures]) -> str:
    """Return one table of all cases: tokens per second of the first arm, and its speed over the other arms."""
    others = [arm for arm in ARMS if any(arm in list(case["arms"])[1:] for case in figures.values())]
    lines = [
        "## All cases",
        "",
        "*ours*: tokens per second of hybrid data parallelism; *over* an arm: how many times as fast ours is.",
        "Medians of steps.",
        "",
        f"| lengths, nodes x ranks, links | ours | {' | '.join(f'over {arm}' for arm in others)} |",
        "|---" * (2 + len(others)) + "|",
    ]
    for name, case in figures.items():
        first, *_ = case["arms"].values()
        over = [case["arms"][arm]["over"] if arm in case["arms"] else None for arm in others]
        cells = ["" if ratio is None else f"{ratio['median']:.2f}" for ratio in over]
        lines.append(f"| {name} | {first['tokens_per_second']:,.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def head(results: Results) -> str:
    """Return title, setting and limits."""
    assert results.cost is not None, "nothing was measured"
    eight = Case("byted", 1, 8).topology((1.0, 1.0)).cores_per_rank
    links = matched_links(SPECS[SPEC], results.cost, eight, SCALE).text
    rounds = max((len(runs) for arms in results.cases().values() for runs in arms.values()), default=1)
    measured = "\n    ".join(commands(results.cases(), rounds))
    return f"""# Measured on an emulated cluster

This page is written by these commands; do not edit it:

    {measured}
    .venv/bin/python scripts/bench/cluster/page.py

Real Megatron training on one machine ({platform.machine()}), over TCP. Each rank has a network namespace with shaped
links and a share of a core, so the time of a waiting rank is lost, as on a GPU. All arms train the same model on the
same documents with equal losses. Lengths are published distributions 1:{SCALE} (a context of {CONTEXT:,} tokens
represents {CONTEXT * SCALE // 1024}K), with about {STEP_TOKENS:,} tokens a step; documents below {SHORTEST} tokens are
joined. Each arm runs up to {rounds} times, every other round in reverse; {results.setting["steps"] - 1:g} steps of each
run count.

*matched* links have the ratio of bytes to computation of {SPEC}; *fast* links are four times as fast, *slow* links a
quarter as fast.

```
{links}
```

Only ratios within one case are comparable. Processor time spent in TCP counts against a rank's share, kernels are CPU
kernels, and launches cost more relative to them than on a GPU."""


def commands(cases: Mapping[str, Arms], rounds: int) -> list[str]:
    """Return the commands that ran these cases; some arms ran ``rounds`` times."""
    speed = "sudo .venv/bin/python scripts/bench/cluster/speed.py"
    of_all, quick = ({str(planned.case) for planned in table} for table in (FULL, QUICK))
    again = f" --rounds {rounds}" if rounds > 1 else ""
    if of_all <= set(cases):
        first = [speed]
        named = [case for case, arms in cases.items() if again and max(map(len, arms.values())) == rounds]
    else:
        first = [f"{speed} --quick{again}"] if quick & set(cases) else []
        named, again = [case for case in cases if case not in quick], ""
    words = " ".join(f'"{case}"' for case in named)
    return [*first, *([f"{speed} --cases {words}{again}"] if named else [])]


def case_section(name: str, figures: CaseFigures, refused: Mapping[str, str]) -> str:
    """Return the table of a case."""
    lines = [
        f"## {name}",
        "",
        "| arm | tokens/s | ours is | MB sent, a step | between nodes | computing | sending | waiting |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, row in figures["arms"].items():
        lines.append(
            f"| {ARMS[arm].title} | {row['tokens_per_second']:,.0f} | {ratio_text(row['over'])} | "
            f"{row['megabytes_sent']:.1f} | {row['between_megabytes']:.1f} | "
            f"{row['computing']:.0%} | {row['sending']:.0%} | {row['waiting']:.0%} |"
        )
    lines += [f"| {ARMS[arm].title} | refused: {reason} | | | | | | |" for arm, reason in refused.items()]
    return "\n".join([*lines, "", f"Losses differ by at most {figures['largest_loss_difference']:.1e}."])


def cost_section(cases: Mapping[str, Arms]) -> str:
    """Return the errors of predicted times: a row for each arm, over its cases."""
    lines = [
        "## The cost model",
        "",
        "`bytescale profile` measures the ranks once, on unlimited links; the rates of other links follow from their "
        "setting. Error of the predicted time of one step, forward and backward passes without gradients and "
        "optimizer, relative to the measured time:",
        "",
        "| arm | cases | median error | lowest | highest |",
        "|---|---|---|---|---|",
    ]
    errors: dict[str, list[tuple[float, str]]] = {}
    for name, arms in cases.items():
        for arm, (predicted, measured) in predictions(arms).items():
            errors.setdefault(arm, []).append((predicted / measured - 1, name))
    for arm, found in errors.items():
        median = statistics.median(error for error, _ in found)
        ends = " | ".join(f"{error:+.1%} ({name})" for error, name in (min(found), max(found)))
        lines.append(f"| {arm} | {len(found)} | {median:+.1%} | {ends} |")
    return "\n".join(lines)


def draw_speed(figures: Mapping[str, CaseFigures], path: Path) -> None:
    """Draw how many times as fast ours is against the speed of links, on the most measured cluster of each sampler."""
    by_setting: dict[Case, list[Case]] = {}
    for case in map(Case.parse, figures):
        if case.link in LINKS:
            by_setting.setdefault(replace(case, link=""), []).append(case)
    order = sorted(LINKS, key=lambda link: LINKS[link] or float("inf"))
    settings = sorted(by_setting.values(), key=len, reverse=True)
    by_sampler: dict[str, list[Case]] = {}
    for cases in settings:
        by_sampler.setdefault(cases[0].sampler, cases)
    chosen = [cases for cases in by_sampler.values() if len(cases) > 1] or settings[:1]
    figure, panels = new_figure(4.6 * len(chosen), 4.4, columns=len(chosen))
    for axes, cases in zip(panels, chosen, strict=True):
        cases.sort(key=lambda case: order.index(case.link))
        arms_of = [figures[str(case)]["arms"] for case in cases]
        for arm in ("naive", "bytescale", "static", "hybrid", "packed"):
            ratios = [(place, arms[arm]["over"]) for place, arms in enumerate(arms_of) if arm in arms]
            points = [(float(place), ratio["median"]) for place, ratio in ratios if ratio is not None]
            if points:
                draw_line(axes, ARM_STYLES[arm], points, f"ours over {arm}")
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(cases)), [case.link for case in cases])
        axes.set_xlabel("links")
        axes.set_ylim(bottom=0.0)
        set_grid(axes, "y")
        set_title(axes, f"{cases[0].sampler}, {cases[0].num_nodes} nodes of {cases[0].ranks_per_node} ranks")
    panels[0].set_ylabel("speed, ours over another arm")
    set_legend(figure, panels[0], 5)
    save(figure, path)


def draw_time(figures: Mapping[str, CaseFigures], path: Path) -> None:
    """Draw the shares of computing, sending, other work and waiting in the ranks' time, a bar for each arm."""
    figure, panels = _panels(figures)
    for axes, case in zip(panels, figures.values(), strict=False):
        for row, shares in enumerate(case["arms"].values()):
            draw_times(axes, row, {kind: 100.0 * float(shares[kind]) for kind in _KINDS})  # type: ignore[literal-required]
        axes.set_xlim(0.0, 100.0)
        axes.set_xlabel("time of the ranks (%)")
    set_legend(figure, panels[0], len(_KINDS))
    save(figure, path)


def draw_bytes(figures: Mapping[str, CaseFigures], path: Path) -> None:
    """Draw the megabytes that cross nodes in a step, in the cases of several nodes, a bar for each arm."""
    shown = {name: case for name, case in figures.items() if Case.parse(name).num_nodes > 1}
    if not shown:
        return
    figure, panels = _panels(shown)
    for axes, case in zip(panels, shown.values(), strict=False):
        for row, (arm, values) in enumerate(case["arms"].items()):
            megabytes = values["between_megabytes"]
            axes.barh(row, megabytes, height=0.7, color=ARM_STYLES[arm].colour)
            axes.annotate(f"{megabytes:.1f}", (megabytes, row), xytext=(4, 0), textcoords="offset points", va="center",
                          fontsize=8, color=INK)  # fmt: skip
        axes.margins(x=0.15)
        axes.set_xlabel("between nodes (MB a step)")
    save(figure, path)


def _panels(figures: Mapping[str, CaseFigures]) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each case, three in a row, whose rows are named after the arms of the case."""
    names = list(figures)
    rows = [names[start : start + 3] for start in range(0, len(names), 3)]
    most = [max(len(figures[name]["arms"]) for name in row) for row in rows]
    columns = min(3, len(names))
    figure, panels = new_figure(4.4 * columns, sum(1.1 + 0.22 * bars for bars in most), columns, most)
    for axes, name in zip_longest(panels, names):
        if name is None:
            axes.set_axis_off()
            continue
        name_rows(axes, list(figures[name]["arms"]))
        set_title(axes, name)
    return figure, panels


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "cluster" / "results.json", metavar="FILE")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "measured.md", metavar="FILE")
    args = parser.parse_args(argv)
    try:
        results = Results.read(args.results)
        if not results.cases() or results.cost is None:
            raise ValueError(f"{args.results} holds no runs yet")
        write_text(args.output, page(results))
        pictures = args.output.with_suffix("")
        pictures.mkdir(exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"page.py: error: {error}", file=sys.stderr)
        return 2
    figures = {name: case_figures(arms) for name, arms in results.cases().items()}
    draw_speed(figures, pictures / "speed.png")
    detailed = in_detail(figures)
    draw_time(detailed, pictures / "time.png")
    draw_bytes(detailed, pictures / "bytes.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
