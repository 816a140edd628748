"""Write docs/reference/ from the code: flags, refusals, commands, figures of the log, and the tree of packages.

python -m scripts.reference          # write the pages
python -m scripts.reference --check  # exit code 1 if a page is not up to date
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from bytescale_ext.measure.metrics import IntervalMetrics, RankStep
from bytescale_ext.measure.progress import Progress
from bytescale_ext.new_file import write_text
from bytescale_ext.plan.hdp import table as planners
from megatron.bytescale import cli
from megatron.bytescale.arguments.parse import add_arguments
from megatron.bytescale.arguments.refusals import ALWAYS
from megatron.bytescale.features import FEATURES, refusals
from megatron.bytescale.features.feature import Feature

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
DO_NOT_EDIT = "Written by `python -m scripts.reference` from the code; do not edit.\n"


def main() -> int:
    """Write the pages, or compare them with the code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the pages, and write nothing")
    check = parser.parse_args().check
    stale = [name for name, text in pages().items() if not is_current(name, text)]
    for name in stale if not check else ():
        write_text(FOLDER / name, pages()[name])
    if stale and check:
        print(f"error: not up to date: {', '.join(stale)}; run python -m scripts.reference", file=sys.stderr)
    return int(bool(stale) and check)


def is_current(name: str, text: str) -> bool:
    """Return whether a page on disk has this text."""
    path = FOLDER / name
    return path.is_file() and path.read_text(encoding="utf-8") == text


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {
        "flags.md": flags_page(),
        "refusals.md": refusals_page(),
        "commands.md": commands_page(),
        "log.md": log_page(),
        "tree.md": tree_page(),
    }


def flags_page() -> str:
    """Return the page of training flags, feature by feature."""
    shared = add_arguments(argparse.ArgumentParser(add_help=False))
    of_features = {action.dest for feature in FEATURES for action in feature.actions()}
    rest = [action for action in shared._actions if action.dest not in of_features]
    parts = [
        f"# Flags\n\n{DO_NOT_EDIT}",
        "`pretrain_gpt_hdp.py`, `bytescale train` and `torchrun -m megatron.bytescale.train` take these flags and all\n"
        "flags of Megatron. Settings that do not work together are [refused](refusals.md) with exit code 2 before\n"
        "anything is built.\n",
        f"## Device and costs\n\n{options_table(shared, rest, 'flag')}",
    ]
    for feature in FEATURES:
        actions = feature.actions()
        table = options_table(shared, actions, "flag") if actions else "Megatron has this flag itself.\n"
        parts.append(f"## {feature.name}: {feature.summary}\n\nSwitched on by {switches_of(feature)}.\n\n{table}")
    return "\n".join([*parts, planners_section()])


def switches_of(feature: Feature[Any]) -> str:
    """Return the flags that switch a feature on."""
    return " or ".join(f"`{flag}`" for flag in feature.switches)


def planners_section() -> str:
    """Return the section with a row for each planner."""
    rows = [
        f"| `{row.name}` | {cell(row.summary)} | {'yes' if row.aligned else 'no'} | {'yes' if row.sliced else 'no'} |\n"
        for row in planners.PLANNERS
    ]
    return (
        "## Planners\n\nChoices of `--hdp-balance`, `bytescale plan --balance` and `bytescale simulate --schedulers`.\n"
        "Pipelines and expert parallelism need aligned slots.\n\n"
        "| planner | balances | aligned slots | plans for slices |\n|---|---|---|---|\n" + "".join(rows)
    )


def options_table(parser: argparse.ArgumentParser, actions: list[argparse.Action], name: str) -> str:
    """Return a table with a row for each option of a parser; ``name`` is the head of the first column."""
    formatter = parser._get_formatter()
    rows = [f"| {name} | what it does |", "|---|---|"]
    for action in actions:
        option = action.option_strings[0] if action.option_strings else ""
        written = " ".join(part for part in (option, *value_of(action)) if part)
        rows.append(f"| `{cell(written)}` | {cell(formatter._expand_help(action)) if action.help else ''} |")
    return "\n".join(rows) + "\n"


def value_of(action: argparse.Action) -> list[str]:
    """Return how the value of an option is written."""
    if action.nargs == 0:
        return []
    if action.choices and not action.metavar:
        return ["{" + ",".join(map(str, action.choices)) + "}"]
    return [str(action.metavar or (action.dest.upper() if action.option_strings else action.dest))]


def refusals_page() -> str:
    """Return the page of refused settings, with what to do instead."""
    return (
        f"# Refused settings\n\n{DO_NOT_EDIT}\n"
        "A run with the feature in the second column refuses the setting in the first.\n"
        "[Limits](../guide/limits.md) gives the reasons. `bytescale doctor --refusals` prints this list.\n\n"
        "| setting | refused by | instead |\n|---|---|---|\n" + "".join(refusal_rows())
    )


def refusal_rows() -> Iterator[str]:
    """Yield a row for each refused setting and advice, with all that refuse it."""
    refusers = {feature.name: switches_of(feature) for feature in FEATURES} | {ALWAYS: "every run"}
    flags = {feature.name: feature.flag for feature in FEATURES} | {ALWAYS: ""}
    refused_by: dict[tuple[str, str], list[str]] = {}
    for row in refusals():
        for name, instead in row.instead.items():
            advice = cell(instead.format(flags[name]))
            refused_by.setdefault((row.flag, advice), []).append(refusers[name])
    for (flag, advice), names in sorted(refused_by.items()):
        yield f"| `{flag}` | {', '.join(names)} | {advice} |\n"


def commands_page() -> str:
    """Return the page of the subcommands of ``bytescale``."""
    parts = [
        f"# Commands\n\n{DO_NOT_EDIT}\n"
        "The same text as `bytescale COMMAND --help`. In the examples `$MODEL_FLAGS` stands for Megatron's flags of a\n"
        "model, such as `--num-layers 32 --hidden-size 4096`, and `$TRAINING_FLAGS` for all words after\n"
        "`pretrain_gpt_hdp.py`.\n"
    ]
    return "\n".join([*parts, *sections_of(cli.parser())])


def sections_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the section of each subcommand below a parser, depth first."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        for sub in action.choices.values():
            options = [
                one for one in sub._actions if not isinstance(one, argparse._SubParsersAction | argparse._HelpAction)
            ]
            below = list(sections_of(sub))
            example = (
                "" if below else f"\n```text\n{' '.join((sub.epilog or '').removeprefix('example: ').split())}\n```\n"
            )
            table = f"\n{options_table(sub, options, 'option')}" if options else ""
            yield f"## {sub.prog}\n\n{sentence(sub.description or '')}\n{example}{table}"
            yield from below


def sentence(text: str) -> str:
    """Return a help text as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def log_page() -> str:
    """Return the page of the figures that a training logs."""
    ranks = [RankStep(1.0, 1.0, 2.0, 100.0, 100.0, 0.0, 1e6), RankStep(1.5, 1.0, 3.0, 100.0, 110.0, 0.0, 1e6)]
    metrics = replace(IntervalMetrics.of(10, 10, 1.0, ranks), predicted_over_measured=0.98)
    run = Progress(14.2, 3.335, 4e-4, 0.713, 1_348_096, 142, None)
    return (
        f"# Figures of the log\n\n{DO_NOT_EDIT}\n"
        "Two lines follow Megatron's own, at its `--log-interval`:\n\n"
        f"```\n{metrics.line()}\n{run.line()}\n```\n\n"
        "`--hdp-log-dir DIR` writes the same figures to `DIR/metrics.jsonl`, one line for each interval. TensorBoard\n"
        "and W&B have them under `hdp/`, without the figures of features that are off.\n\n"
        "| figure | meaning |\n|---|---|\n" + "".join(figure_rows(IntervalMetrics)) + "".join(figure_rows(Progress))
    )


def figure_rows(kind: type) -> Iterator[str]:
    """Yield a row for each field of a dataclass, whose docstring describes every field under "Attributes"."""
    text = (kind.__doc__ or "").partition("Attributes:")[2]
    meanings = dict(re.findall(r"^ {8}(\w+): (.*?)(?=^ {8}\w|\Z)", text, re.MULTILINE | re.DOTALL))
    for field in fields(kind):
        yield f"| `{field.name}` | {cell(meanings[field.name]).rstrip('.')} |\n"


def tree_page() -> str:
    """Return the page of the packages, with the docstring and the modules of each."""
    packages = [
        path.parent for top in ("megatron/bytescale", "bytescale_ext") for path in (ROOT / top).rglob("__init__.py")
    ]
    return (
        f"# Tree\n\n{DO_NOT_EDIT}\n"
        "Imports go one way: `pretrain_gpt_hdp.py`, `megatron/bytescale/`, `bytescale_ext/`, `bytescale_ext/plan/`.\n"
        "[Architecture](../architecture.md) explains the design. `tests/` mirrors this tree.\n\n"
        "| folder | content | modules |\n|---|---|---|\n" + "".join(map(package_row, sorted(packages)))
    )


def package_row(folder: Path) -> str:
    """Return the row of a package; one without modules and docstring has none."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "__main__"))
    if not docstring and not names:
        return ""
    summary = cell(docstring.partition("\n\n")[0])
    return f"| `{folder.relative_to(ROOT)}/` | {summary} | {', '.join(names)} |\n"


def cell(text: str) -> str:
    """Return text that fits into a cell of a table."""
    return re.sub(r"\s+", " ", text).strip().replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
