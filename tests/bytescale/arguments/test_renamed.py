"""Old names of flags are refused with the new name, and the changelog has the same replacements."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from megatron.bytescale.arguments.parse import add_arguments, parse
from megatron.bytescale.arguments.renamed import RENAMED, TRAINING, Renamed, refuse_words
from megatron.bytescale.cli import COMMANDS

CHANGELOG = Path(__file__).resolve().parents[3] / "CHANGELOG.md"
FLAG = r"--[a-z][a-z0-9-]+"
ROW = re.compile(r"^\| `(--[\w-]+)` \| (.+) \| ([\w, -]+) \|$", re.MULTILINE)


@pytest.mark.parametrize("row", RENAMED, ids=lambda row: f"{row.old} {row.where}")
def test_old_spellings_name_the_new_one(row: Renamed) -> None:
    for where in row.where.split(", "):
        for words in ([row.old, "1"], ["--seed=1", f"{row.old}=1"]):
            with pytest.raises(ValueError, match=f"^{re.escape(f'{row.old} is now {row.new}')}$"):
                refuse_words(words, where)
        refuse_words([row.new, f"--other={row.old}"], where)


def test_a_launch_line_is_refused_before_it_is_parsed() -> None:
    old = next(row.old for row in RENAMED if row.where == TRAINING)
    with pytest.raises(ValueError, match=f"^{old} is now "):
        parse(["pretrain_gpt_hdp.py", old, "1"], on_cpu=True)


def test_trainings_know_the_new_flags_and_none_of_the_old() -> None:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    flags = {flag for action in parser._actions for flag in action.option_strings}
    rows = [row for row in RENAMED if TRAINING in row.where.split(", ")]
    assert not flags & {row.old for row in rows}
    megatron = re.findall(FLAG, Path(__file__).with_name("flags.toml").read_text())
    assert {flag for row in rows for flag in re.findall(FLAG, row.new)} <= {*flags, *megatron}


def test_rows_name_commands() -> None:
    names = {TRAINING, *(command.NAME for command in COMMANDS)}
    assert {where.split()[0] for row in RENAMED for where in row.where.split(", ")} <= names


def test_the_changelog_has_the_same_rows() -> None:
    told = [(old, new.replace("`", ""), where) for old, new, where in ROW.findall(CHANGELOG.read_text())]
    assert told == [(row.old, row.new, row.where) for row in RENAMED]
