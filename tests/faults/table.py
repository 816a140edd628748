"""The table of tried points on docs/results/faults.md, between two marks of the page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tests.faults.points import FAULTS
from tests.faults.trials import Tried

BEGIN, END = "<!-- points: begin -->", "<!-- points: end -->"


def table(results: Sequence[Tried], earlier: str = "") -> str:
    """Return the table of results; a fault that was not tried keeps its row of an ``earlier`` table."""
    rows = [
        "| fault | points | as wanted | seconds to the end of the last rank (median, most) | went on from iteration |",
        "|---|---|---|---|---|",
    ]
    for key, fault in FAULTS.items():
        found = [one for one in results if one.fault == key]
        if not found:
            begin = f"| {fault.text} | "
            known = (row for row in earlier.splitlines() if row.startswith(begin))
            rows.append(next(known, f"{begin}not tried | | | |"))
            continue
        ended = [one.end_seconds for one in found if one.end_seconds is not None]
        seconds = f"{median(ended):.1f}, {max(ended):.1f}" if ended else "-" if fault.ends else "goes on"
        starts = sorted({one.resumed_from for one in found if one.resumed_from is not None})
        well = sum(not one.problems for one in found)
        rows.append(f"| {fault.text} | {len(found)} | {well} | {seconds} | {', '.join(map(str, starts)) or '-'} |")
    return "\n".join(rows)


def with_table(page: str, results: Sequence[Tried]) -> str:
    """Return the page with these results in its table."""
    before, rest = page.split(BEGIN)
    earlier, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(results, earlier)}\n{END}{after}"
