"""README and docs name flags, paths, commands and launch lines that exist."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron.bytescale import cli
from megatron.bytescale.arguments.parse import add_arguments
from megatron.bytescale.features import refusals
from scripts import reference
from tests.e2e.docs.pages import code_lines
from tests.harness import run_ranks
from tests.tree import PAGE, patch_rows, with_rooms

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
OUR_PREFIXES = (
    "--hdp-",
    "--hybrid-data",
    "--seq1f1b-",
    "--state-",
    "--ngram-",
    "--embedding-",
    "--draft-",
    "--sculpt-",
)
PAPERS = [README, ROOT / "CONTRIBUTING.md", *PAGES, ROOT / "scripts" / "bench" / "LOG.md"]
TREES = ("bytescale_ext", "docs", "megatron", "scripts", "tests", ".ci")
MUST_NOT_EXIST = "megatron/__init__.py"
FLAG = re.compile(r"--[a-z][a-z0-9-]*")
REFUSED_FLAGS = {found.group() for row in refusals() if (found := FLAG.match(row.flag))}


def our_flags() -> set[str]:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    return {option for action in parser._actions for option in action.option_strings}


def test_readme_is_short_and_names_a_command_for_each_figure() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    head = lines.index("| compared with | speed-up, lowest to highest case | how | command |")
    rows = [line.split(" | ") for line in lines[head + 2 : lines.index("", head)]]
    assert len(rows) > 4
    assert [row[-1] for row in rows if not row[-1].startswith(("`", "the same"))] == []


@pytest.mark.parametrize("page", [README, *GUIDE], ids=lambda page: page.name)
def test_variables_of_commands_are_explained_on_their_page(page: Path) -> None:
    text = page.read_text()
    for variable in set(re.findall(r"\$\w+_FLAGS", text)):
        assert f"`{variable}` stands for" in text


def test_the_citation_names_every_paper_of_the_readme() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert cited["version"] == version[1]
    assert all(one["title"] and one["authors"] for one in cited["references"])
    named = set(re.findall(r"https://arxiv.org/abs/[\d.]+\d", README.read_text()))
    assert len(named) >= 3
    assert named <= {one["url"] for one in cited["references"]}


def test_reference_pages_are_up_to_date() -> None:
    pages = reference.pages()
    stale = [name for name, text in pages.items() if not reference.is_current(name, text)]
    assert not stale, "run python -m scripts.reference"
    assert sorted(path.name for path in reference.FOLDER.iterdir()) == sorted([*pages, "trust.md"])  # written by hand
    assert our_flags() <= set(FLAG.findall(pages["flags.md"]))
    assert REFUSED_FLAGS <= set(FLAG.findall(pages["refusals.md"]))
    assert all(f"## bytescale {command.NAME}\n" in pages["commands.md"] for command in cli.COMMANDS)


@pytest.mark.parametrize("paper", [README, *GUIDE], ids=lambda path: path.name)
def test_pages_name_no_flag_that_is_not_there(paper: Path) -> None:
    named = set(FLAG.findall(paper.read_text()))
    look_like_ours = {flag for flag in named if flag.startswith(OUR_PREFIXES)}
    assert look_like_ours <= our_flags() | REFUSED_FLAGS


def test_the_page_of_limits_calls_refused_only_what_is() -> None:
    rows = [line for line in (ROOT / "docs" / "guide" / "limits.md").read_text().splitlines()
            if re.match(r"\|.*\| refused", line)]  # fmt: skip
    flags = {flag for row in rows for flag in FLAG.findall(row.split("|")[1])}
    assert len(flags) > 15
    assert flags <= REFUSED_FLAGS, f"not refused: {sorted(flags - REFUSED_FLAGS)}"


WORDS = 35_000
WRITTEN = {
    **{f"docs/reference/{name}": "scripts/reference.py" for name in reference.pages()},
    "docs/results/simulated.md": "scripts/bench/plan/simulate_table.py",
    "docs/results/measured.md": "scripts/bench/cluster/page.py",
    "docs/results/cluster.md": "scripts/bench/cluster/virtual/page.py",
    "docs/results/rollouts.md": "scripts/bench/cluster/virtual/rollouts.py",
}
"""Pages that a script writes whole, and the script."""
WRITTEN_PART = re.compile(r"<!-- (\w+)(: begin|: \S+) -->.*?<!-- (\1: end|end of \1) -->", re.DOTALL)


def own_words(page: Path) -> int:
    """Return the number of words of a page that people write."""
    if str(page.relative_to(ROOT)) in WRITTEN:
        return 0
    return len(WRITTEN_PART.sub("", page.read_text()).split())


def test_the_documents_are_short() -> None:
    pages = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")), *PAGES]
    words = {str(page.relative_to(ROOT)): own_words(page) for page in pages}
    longest = sorted(words, key=lambda name: -words[name])[:8]
    assert sum(words.values()) <= WORDS, f"longest pages: {', '.join(f'{name} {words[name]}' for name in longest)}"


def test_written_pages_and_parts_are_known() -> None:
    marked = {page.name for page in PAGES if WRITTEN_PART.search(page.read_text())}
    assert marked == {"architecture.md", "faults.md", "slices.md", "tested.md"}
    for name, script in WRITTEN.items():
        head, named = (ROOT / name).read_text()[:300], script.removesuffix(".py")
        assert "do not edit" in head, name
        assert script in (ROOT / name).read_text() or named.replace("/", ".") in head, name


def leads_somewhere(paper: Path, link: str) -> bool:
    """Return whether a link of a page names a file of the repository and, if given, a heading of the file."""
    name, _, heading = link.partition("#")
    target = paper.parent / name if name else paper
    lines = target.read_text().splitlines() if heading and target.is_file() else []
    headings = {line.strip("# ").lower().replace(" ", "-") for line in lines if line.startswith("#")}
    return target.exists() and (not heading or heading in headings)


def test_links_to_nothing_are_found() -> None:
    page = ROOT / "docs" / "guide" / "recipes.md"
    assert leads_somewhere(page, "../reference/flags.md#device-and-costs")
    assert not any(leads_somewhere(page, link) for link in ("../reference/flags.md#accepted", "README.md", "#nothing"))


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: path.name)
def test_paths_exist(paper: Path) -> None:
    text = paper.read_text()
    words = set(re.findall(r"[\w./-]+", text))
    paths = {word.rstrip(".") for word in words if word.split("/")[0] in TREES and "/" in word}
    links = {target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target}
    assert paths or links or paper.name == "LOG.md" or paper.parent == reference.FOLDER
    missing = {path for path in paths - {MUST_NOT_EXIST} if not (ROOT / path).exists()}
    missing |= {link for link in links if not leads_somewhere(paper, link)}
    assert not missing
    assert not (ROOT / MUST_NOT_EXIST).exists()


CELL = re.compile(r"(?<!\\)\|")
SEPARATOR = re.compile(r"\|( *:?-+:? *\|)+")


def broken_rows(text: str) -> list[str]:
    """Return the rows of Markdown tables that do not fit their table, outside code blocks.

    A table follows an empty line or a comment, has a separator below its header, and equally many cells in each row.
    """
    broken, table, before = [], list[str](), ""
    for line in re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).splitlines():
        if not line.lstrip().startswith("|"):
            broken += table if len(table) == 1 else []
            table, before = [], line
            continue
        table.append(line)
        is_head = len(table) == 1 and (not before.strip() or before.endswith("-->"))
        is_separator = len(table) == 2 and SEPARATOR.fullmatch(line)
        fits = line.endswith("|") and len(CELL.findall(line)) == len(CELL.findall(table[0]))
        if not fits or not (is_head or is_separator or len(table) > 2):
            broken.append(line)
    return broken + (table if len(table) == 1 else [])


def test_broken_tables_are_found() -> None:
    head = "| a | b |\n|---|---|\n"
    assert broken_rows(f"text\n\n{head}| c | d \\| e |\n\n```\n| f\n```\n") == []
    assert broken_rows(f"{head}| c | d | e |\n| f |\n") == ["| c | d | e |", "| f |"]
    assert broken_rows(f"text\n{head}") == ["| a | b |"]
    assert broken_rows("\n| a | b |\n\n| c | d |\n| e | f |\n") == ["| a | b |", "| e | f |"]


@pytest.mark.parametrize("paper", [*PAPERS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_tables_are_whole(paper: Path) -> None:
    assert broken_rows(paper.read_text()) == []


def test_the_architecture_page_has_the_rooms_of_the_plan() -> None:
    assert with_rooms(PAGE.read_text()) == PAGE.read_text(), "run python -m tests.tree"


def test_the_architecture_page_names_every_patch() -> None:
    replaced = [row for row in patch_rows() if "wrap" in row and row["features"] != "(CPU,)"]
    patched = {row["target"].strip("'").partition(":")[2] for row in replaced}
    told = re.findall(r"patch: `([\w.]+)`", (ROOT / "docs" / "architecture.md").read_text())
    assert patched
    assert set(told) == patched


@pytest.mark.parametrize("paper", PAPERS[:2], ids=lambda path: path.name)
def test_make_targets_exist(paper: Path) -> None:
    text = paper.read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z]+)`", text))
    named |= {line.split()[1] for line in code_lines(text) if line.startswith("make ")}
    assert named
    assert named <= targets


def test_console_commands_parse() -> None:
    shown = [
        line for page in (README, *GUIDE) for line in code_lines(page.read_text()) if line.startswith("bytescale ")
    ]
    used = {cli.parse(shlex.split(line, comments=True)[1:]).command for line in shown}
    assert len(used) > 12


def test_figures_of_the_log_line_are_explained() -> None:
    from bytescale_ext.measure.metrics import IntervalMetrics, RankStep

    ranks = [RankStep(1.0, 1.0, 2.0, 100.0, 100.0, 0.0, 1e6), RankStep(1.5, 1.0, 3.0, 100.0, 110.0, 0.0, 1e6)]
    line = replace(IntervalMetrics.of(1, 1, 1.0, ranks), predicted_over_measured=0.98).line()
    page = ROOT / "docs" / "guide" / "training.md"
    (shown,) = (row for row in page.read_text().splitlines() if row.startswith(" hdp: "))
    without_figures = r"[\d.,]+( (?=\d))?"
    assert re.sub(without_figures, "", shown).split() == re.sub(without_figures, "", line).split()


def launch_lines() -> tuple[list[str], list[str]]:
    """Return the words of both launch lines, (before, after)."""
    lines = [shlex.split(line) for line in code_lines(README.read_text()) if line.startswith("torchrun ")]
    before, after = lines
    assert "pretrain_gpt.py" in before
    assert "pretrain_gpt_hdp.py" in after
    return before, after


def parse_launch_line(rank: int, world: int, words: list[str], num_ranks: int) -> str:
    """Parse in a separate process: return "" if the flags are accepted, else the error; no tokenizer, no data."""
    os.environ["WORLD_SIZE"] = str(num_ranks)
    sys.argv = ["pretrain_gpt_hdp.py", *words]
    from megatron.training.arguments import parse_args

    from megatron.bytescale import features
    from megatron.bytescale.arguments.model_shape import cluster

    args = parse_args(add_arguments)
    if not args.hybrid_data_parallel:
        return "parsed"
    features.check(args)
    ranks = cluster(args)
    return f"{ranks.num_ranks} ranks of {ranks.tokens_per_rank} tokens"


def parsed(words: list[str]) -> str:
    num_ranks = int(words[words.index("--nproc-per-node") + 1])
    flags = words[next(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]
    return str(run_ranks(parse_launch_line, 1, flags, num_ranks, init_group=False)[0])


@pytest.mark.ranks
def test_launch_lines_are_taken() -> None:
    before, after = launch_lines()
    assert parsed(before) == "parsed"
    assert parsed(after) == "8 ranks of 8192 tokens"


def test_the_old_launch_line_would_be_refused_for_what_the_readme_takes_off() -> None:
    before, after = launch_lines()
    gone = {flag for flag in FLAG.findall(" ".join(before)) if flag not in after}
    new = {flag for flag in FLAG.findall(" ".join(after)) if flag not in before}
    (told_gone,) = (line for line in README.read_text().split("\n- ") if line.startswith("Gone:"))
    (told_on,) = (line for line in README.read_text().split("\n- ") if line.startswith("Set automatically:"))
    assert gone == set(FLAG.findall(told_gone)) | ({"--calculate-per-token-loss"} & set(FLAG.findall(told_on)))
    assert gone - {"--calculate-per-token-loss"} <= REFUSED_FLAGS
    assert new == {"--hybrid-data-parallel", "--hdp-tokens-per-rank", "--attention-dropout"}
