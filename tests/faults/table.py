"""The table of tried points on docs/results/faults.md, between two marks of the page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tests.faults.points import FAULTS
from tests.faults.trials import Tried

BEGIN, END = "<!-- points: begin -->", "<!-- points: end -->"


def table(results: Sequence[Tried], earlier: str = "") -> str:
    """Return the table of results; a fault without results keeps its row of an ``earlier`` table."""
    rows = [
        "| fault | points | as expected | seconds to the end of the last rank (median, max) | resumed from iteration |",
        "|---|---|---|---|---|",
    ]
    for key, fault in FAULTS.items():
        trials = [trial for trial in results if trial.fault == key]
        if not trials:
            begin = f"| {fault.text} | "
            known = (row for row in earlier.splitlines() if row.startswith(begin))
            rows.append(next(known, f"{begin}not tried | | | |"))
            continue
        ended = [trial.end_seconds for trial in trials if trial.end_seconds is not None]
        seconds = f"{median(ended):.1f}, {max(ended):.1f}" if ended else "-" if fault.ends else "continues"
        starts = sorted({trial.resumed_from for trial in trials if trial.resumed_from is not None})
        good = sum(not trial.problems for trial in trials)
        rows.append(f"| {fault.text} | {len(trials)} | {good} | {seconds} | {', '.join(map(str, starts)) or '-'} |")
    return "\n".join(rows)


def with_table(page: str, results: Sequence[Tried]) -> str:
    """Return the page with the results in its table."""
    before, rest = page.split(BEGIN)
    earlier, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(results, earlier)}\n{END}{after}"
