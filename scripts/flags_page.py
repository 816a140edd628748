"""Write docs/reference/flags.md from the parser: our flags, and everything that is refused with its replacement.

python scripts/flags_page.py          # write it
python scripts/flags_page.py --check  # exit code 1 if it is not up to date
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from bytescale_ext.plan.hdp import table
from megatron.bytescale.arguments.parse import add_arguments
from megatron.bytescale.arguments.refusals import ALWAYS
from megatron.bytescale.features import FEATURES, refusals

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "flags.md"
HEAD = """# Flags

Written by `scripts/flags_page.py` from the parser; do not edit. They stand beside Megatron's own flags, on the command
line of `pretrain_gpt_hdp.py`, `bytescale train` and `torchrun -m megatron.bytescale.train`. Every flag of Megatron is
honoured, or refused in one line with exit code 2 before anything is built.
"""


PLANNERS_HEAD = """The choices of `--hdp-balance`, of `bytescale plan --balance` and, in addition to others, of
`bytescale simulate --schedulers`. Pipelines and expert parallelism need aligned slots.
"""


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() != page():
        print(f"error: {PAGE} is not up to date; run python scripts/flags_page.py", file=sys.stderr)
        return 1
    return 0


def page() -> str:
    """Return the page."""
    shared = add_arguments(argparse.ArgumentParser(add_help=False))
    of_features = {action.dest for feature in FEATURES for action in feature.actions()}
    rest = [action for action in shared._actions if action.dest not in of_features]
    parts = [HEAD, "## Device and costs\n", flags_table(rest)]
    for feature in FEATURES:
        parts += [f"## {feature.name}: {feature.summary}\n", f"Switched on by `{feature.flag}`.\n"]
        parts += [flags_table(feature.actions()) if feature.actions() else "That is a flag of Megatron's own.\n"]
    parts += ["## Planners\n", PLANNERS_HEAD, planners_table()]
    parts += ["## Refused\n", "| flag | with | instead |\n|---|---|---|\n" + "".join(refusal_rows())]
    return "\n".join(parts)


def flags_table(actions: list[argparse.Action]) -> str:
    """Return a table with a row for each flag."""
    rows = ["| flag | what it does |", "|---|---|"]
    for action in actions:
        flag = " ".join([action.option_strings[0], *value_of(action)])
        rows.append(f"| `{flag}` | {cell(action.help or '')} |")
    return "\n".join(rows) + "\n"


def planners_table() -> str:
    """Return a table with a row for each planner."""
    rows = ["| planner | balances | aligned slots | plans for slices |", "|---|---|---|---|"]
    for row in table.PLANNERS:
        can = ["yes" if value else "no" for value in (row.aligned, row.sliced)]
        rows.append(" | ".join((f"| `{row.name}`", cell(row.summary), *can)) + " |")
    return "\n".join(rows) + "\n"


def value_of(action: argparse.Action) -> list[str]:
    """Return how the value of a flag is written."""
    if action.nargs == 0:
        return []
    if action.choices and not action.metavar:
        return ["{" + ",".join(map(str, action.choices)) + "}"]
    return [str(action.metavar or action.dest.upper())]


def refusal_rows() -> list[str]:
    """Return a row for each refused flag and advice, with all that refuse it."""
    flags = {feature.name: f"`{feature.flag}`" for feature in FEATURES} | {ALWAYS: "every run"}
    refused_by: dict[tuple[str, str], list[str]] = {}
    for row in refusals():
        for name, instead in row.instead.items():
            advice = cell(instead.format(flags[name].strip("`")))
            refused_by.setdefault((row.flag, advice), []).append(flags[name])
    return [f"| `{flag}` | {', '.join(names)} | {advice} |\n" for (flag, advice), names in refused_by.items()]


def cell(text: str) -> str:
    """Return text that fits into a cell of a table."""
    return re.sub(r"\s+", " ", text.replace("%%", "%").replace("|", "\\|"))


if __name__ == "__main__":
    sys.exit(main())
