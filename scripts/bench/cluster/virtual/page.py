"""Write docs/results/cluster.md and its picture from the results of ``speed.py --device-times``.

.venv/bin/python scripts/bench/cluster/virtual/page.py [--results docs/results/cluster/h100.json]

The script takes a few seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))  # so that it also runs as a file

from bytescale_ext.draw.figure import INK, TIMES, draw_times, name_rows, new_figure, save, set_legend, set_title
from bytescale_ext.new_file import write_text
from scripts.bench.cluster.virtual.bench import LINKS, CaseResult, Results
from scripts.bench.cluster.virtual.cases import ARMS, QUICK, SCALE, SHORTEST, TOKENS_OF_RANK, TOKENS_PER_RANK
from scripts.bench.cluster.virtual.figures import all_figures, arm_figures, table
from scripts.bench.cluster.virtual.replay import MOST_REPEATS
from scripts.bench.report import ROOT, Target

PICTURE = "cluster/times.png"
FIRST_PIPELINE = next(name for name, arm in ARMS.items() if arm.num_stages > 1)


def ratios(cases: Mapping[str, CaseResult], arm: str, baseline: str) -> dict[str, list[float]]:
    """Return how many times as fast ``baseline`` is as ``arm`` in each counted step, by case and links."""
    found = {}
    for case, arms in cases.items():
        if arm not in arms or baseline not in arms:
            continue
        for links, steps in arms[arm]["steps"].items():
            own = arms[baseline]["steps"][links]
            found[f"{case}, {links} Gbit/s"] = [
                other["seconds"] / mine["seconds"] for other, mine in zip(steps, own, strict=True)
            ]
    return found


def compared(cases: Mapping[str, CaseResult]) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Return the ratios of each pair of arms: ours over the others, and slices over 1F1B."""
    pipelines = [name for name, arm in ARMS.items() if arm.num_stages > 1 and name != FIRST_PIPELINE]
    pairs = [("ours", name) for name, arm in ARMS.items() if arm.num_stages == 1 and name != "ours"]
    pairs += [(name, FIRST_PIPELINE) for name in pipelines]
    found = {(first, second): ratios(cases, second, first) for first, second in pairs}
    return {pair: steps for pair, steps in found.items() if steps}


def summary(cases: Mapping[str, CaseResult]) -> list[str]:
    """Return the table of all pairs of arms: lowest, median and highest step of all cases."""
    lines = ["| | compared with | lowest | median | highest | cases |", "|---|---|---|---|---|---|"]
    for (first, second), found in compared(cases).items():
        values = [value for steps in found.values() for value in steps]
        low = min(found, key=lambda case: min(found[case]))
        high = max(found, key=lambda case: max(found[case]))
        lines.append(
            f"| {ARMS[first].title} | {ARMS[second].title} | {min(values):.2f} ({low}) | "
            f"{statistics.median(values):.2f} | {max(values):.2f} ({high}) | {len(found)} |"
        )
    return lines


def targets(cases: Mapping[str, CaseResult]) -> list[Target]:
    """Return the targets, as far as their arms have run."""
    pairs = compared(cases)
    values = {pair: [one for steps in found.values() for one in steps] for pair, found in pairs.items()}
    fastest = f"{LINKS[0]:g}"
    rows = [Target("ours: time / bound, highest case", max(over_bounds(cases)), 1.05, at_most=True)]
    for arm, limit in (("hybrid", 1.15), ("bytescale", 1.05)):
        if ("ours", arm) in values:
            rows.append(Target(f"ours over {ARMS[arm].title}, median", statistics.median(values["ours", arm]), limit))
    errors = prediction_errors(cases)
    if errors:
        text = f"error of the predicted time: median of {len(errors)} steps (highest {max(errors):.3f})"
        rows.append(Target(text, statistics.median(errors), 0.05, at_most=True))
    rows += matched_targets([arm_figures(arms, fastest) for arms in cases.values()])
    rows += [
        Target(f"{ARMS[first].title} over 1F1B, lowest step", min(of_pair), 0.98)
        for (first, second), of_pair in values.items()
        if second == FIRST_PIPELINE
    ]
    return rows


def prediction_errors(cases: Mapping[str, CaseResult]) -> list[float]:
    """Return the errors of predicted times, of all steps of arms whose plans follow the costs."""
    return [
        abs(predicted / step["seconds"] - 1)
        for of_case in cases.values()
        for arm in of_case.values()
        for links, of_links in arm["predicted"].items()
        for predicted, step in zip(of_links, arm["steps"][links], strict=True)
    ]


def over_bounds(cases: Mapping[str, CaseResult]) -> list[float]:
    """Return the time of ours over the bound, of each case at each speed of the links."""
    return [arms["ours"]["over_bound"] for of_case in all_figures(cases).values() for arms in of_case.values()]


def matched_targets(cases: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[Target]:
    """Return the targets of learned plans on matched links, the fastest. ``cases``: figures of arms by name."""
    at = f"{LINKS[0]:g} Gbit/s"
    shares = [arms["ours"]["share"] for arms in cases]
    waiting, computing = max(share["waiting"] for share in shares), min(share["computing"] for share in shares)
    rows = [
        Target(f"ours, {at}: waiting over time, highest case", waiting, 0.05, at_most=True),
        Target(f"ours, {at}: time over mean computing, which bounds the imbalance, highest case", 1 / computing, 1.05,
               at_most=True),
    ]  # fmt: skip
    for arm, limit in (("bytescale", 1.08), ("naive", 1.15)):
        medians = [arms[arm]["over"][1] for arms in cases if arm in arms]
        if medians:
            value = statistics.median(medians)
            rows.append(Target(f"ours over {ARMS[arm].title}, {at}, median of cases", value, limit))
    return rows


def how(results: Results) -> list[str]:
    """Return the paragraphs on what is recorded, modelled and left out."""
    sources = sorted({arm["megatron"] for arms in results.cases.values() for arm in arms.values() if "megatron" in arm})
    return [
        "## How", "",
        "Each rank is a CPU process that runs the whole training: loader, planner, Megatron's schedules, rings, "
        f"reductions, optimizer. The model has one layer for each stage, and lengths are 1:{SCALE}. A rank records its "
        "kernels, messages, collectives and waits. A replay runs these programs in virtual time for a 7B model of 32 "
        "layers (grouped-query attention, 8 key-value heads): kernels take their time on the device, launches take "
        "the time of the host, and messages share links max-min fairly. The losses of arms with equal models differ by "
        f"{largest_difference(results.cases):.0e} at most (relative).", "",
        f"- Documents have published lengths. Documents below {SHORTEST} tokens are joined. C is "
        f"{TOKENS_PER_RANK // 1024}K tokens a rank, times the stages of a pipeline. A step has about "
        f"{TOKENS_OF_RANK // 1024}K tokens a rank. {results.setting['steps'] - 1} steps of seed "
        f"{results.setting['seed']} count.",
        f"- Device: {results.setting['source']}",
        "- Links: each GPU has 308 GB/s inside its node of 8 and the stated Gbit/s between nodes. Plans that "
        "follow costs are made for these links, as a profile or learned costs would give them.",
        "- Host: 0.76 ms a layer and direction, 0.09 ms a further block of a ring "
        "(`scripts/bench/host/overhead.py`).",
        "- All documents of a pack, or of a block of a ring, are one launch of variable length, in every arm. Static "
        "context parallelism, packing and Megatron's hybrid plan run with the same rings and kernels as ours, so only "
        "plans and barriers differ.",
        *(f"- Megatron's dynamic plan comes from Megatron-LM's development branch, {source} (first digits of its "
          "SHA-256). Its runtime needs TransformerEngine, so its plan runs with our runtime."
          for source in sources),
        "- Not modelled: memory and recomputation, the processors that NCCL takes from kernels, and planning, which "
        "runs in processes of its own.",
        f"- {MOST_REPEATS // 2} and {MOST_REPEATS} of the 32 equal layers are replayed; their difference is extended "
        "to 32.", "",
    ]  # fmt: skip


def largest_difference(cases: Mapping[str, CaseResult]) -> float:
    """Return the largest relative difference of the losses of two arms with equal models: equal numbers of stages."""
    found = [0.0]
    for arms in cases.values():
        firsts: dict[int, list[float]] = {}
        for name, arm in arms.items():
            first = firsts.setdefault(ARMS[name].num_stages, arm["losses"])
            found += [abs(loss - other) / loss for loss, other in zip(first, arm["losses"], strict=True)]
    return max(found)


def not_run(cases: Mapping[str, CaseResult]) -> str:
    """Return a sentence with the arms of ``--quick`` that have no results."""
    missing = [
        f"{row.case}: {ARMS[arm].title}" for row in QUICK for arm in row.arms if arm not in cases.get(str(row.case), {})
    ]
    return f"Not run yet: {'; '.join(missing)}." if missing else "All cases and arms of `--quick` are here."


def text(results: Results) -> str:
    """Return the page."""
    cases = results.cases
    minutes = sum(arm["minutes"] for arms in cases.values() for arm in arms.values())
    bounds = over_bounds(cases)
    lines = [
        "# The real runtime in the times of a GPU", "",
        "This page is written by one command; do not edit it:", "",
        "    python scripts/bench/cluster/virtual/page.py", "",
        f"Every figure on this page is **emulated with device times** of an {results.setting['device']}. Nothing was "
        "measured on a GPU.", "",
        "    python scripts/bench/cluster/speed.py --device-times h100 --quick", "",
        f"The results took {minutes:.0f} minutes on two cores that other work shared. {not_run(cases)}", "",
        *how(results),
        "## Summary", "",
        "How many times as fast the first is, over all counted steps of all cases and links.", "",
        *summary(cases), "",
        "| figure | target | reached | |", "|---|---|---|---|", *(target.row for target in targets(cases)), "",
        f"![Time of a step by arm and speed of links, and what it is spent on]({PICTURE})", "",
        f"Ours takes {min(bounds):.2f} to {max(bounds):.2f} of the bound of all plans (median step of a case). "
        "The bound counts the blocks of the narrowest rings. It counts no latencies, no sharing of links, "
        f"no optimizer, and links of {LINKS[0]:g} Gbit/s.", "",
    ]  # fmt: skip
    for case, arms in cases.items():
        for links in arms["ours"]["steps"]:
            lines += [f"## {case}, {links} Gbit/s", "", *table(arms, links), ""]
    lines.append(
        "*exchange*: exposed transfers of rings; *stage*: of pipelines; *reduction*: of gradients and parameters; "
        "*waiting*: for other ranks, which may wait for a slower link; *launch*: for the own host."
    )
    return "\n".join(lines) + "\n"


def draw_steps(cases: Mapping[str, CaseResult], path: Path) -> None:
    """Draw the median step of each arm and what it is spent on: a row of panels a case, a panel a speed of links."""
    columns = max(len(arms["ours"]["steps"]) for arms in cases.values())
    most = [len(arms) for arms in cases.values()]
    figure, panels = new_figure(4.4 * columns, 0.5 + sum(1.0 + 0.3 * bars for bars in most), columns, most)
    places = iter(panels)
    for case, arms in cases.items():
        longest = max(row["seconds"] for links in arms["ours"]["steps"] for row in arm_figures(arms, links).values())
        for number, links in enumerate(arms["ours"]["steps"]):
            axes, figures = next(places), arm_figures(arms, links)
            for row, (arm, values) in enumerate(figures.items()):
                end = draw_times(axes, row, {kind: values["seconds"] * part for kind, part in values["share"].items()})
                text = "" if arm == "ours" else f"ours is {values['over'][1]:.2f}x"
                axes.annotate(text, (end, row), xytext=(4, 0), va="center", textcoords="offset points", fontsize=9,
                              color=INK)  # fmt: skip
            name_rows(axes, ["" if number else ARMS[arm].title for arm in figures])
            axes.set_xlim(0.0, 1.3 * longest)
            axes.set_xlabel("time of a step (s, emulated)")
            set_title(axes, f"{case}, {links} Gbit/s")
    set_legend(figure, panels[0], len(TIMES))
    save(figure, path)


def main() -> None:
    """Write the page and its picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results" / "cluster" / "h100.json")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "cluster.md")
    args = parser.parse_args()
    results = Results.read(args.results)
    write_text(args.output, text(results))
    (args.output.parent / PICTURE).parent.mkdir(exist_ok=True)
    draw_steps(results.cases, args.output.parent / PICTURE)


if __name__ == "__main__":
    main()
