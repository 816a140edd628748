"""Each flag of the parser changes what its row says, is refused by name, or has a reason to change nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron.bytescale.arguments.unused import UNUSED_REFUSALS
from tests.harness import run_ranks
from tests.survey.readings import Readings, key_of, read_rows
from tests.survey.rows import NEED_REASON, NOTHING, READINGS, REFUSED, TESTED, TRAINED, Row, rows
from tests.survey.trainings import Trained, train_with_rows

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
ROWS = rows()
READ = [row for row in ROWS if row.changes not in (TESTED, TRAINED)]
IN_TRAININGS = [row for row in ROWS if row.changes == TRAINED]
SAMPLE = list({(row.line, row.changes): row for row in reversed(READ)}.values())
Answers = dict[tuple[str, ...], Readings]


def options(rank: int, world: int) -> list[tuple[list[str], str]]:
    """Return the option strings and the argument of each option of the parser."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron.bytescale.arguments.parse import add_arguments

    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False)))
    return [(list(action.option_strings), action.dest) for action in parser._actions]


@pytest.fixture(scope="module")
def arguments() -> dict[str, str]:
    """Return the argument of each flag."""
    found: list[tuple[list[str], str]] = run_ranks(options, 1, init_group=False)[0]
    return {flag: dest for flags, dest in found for flag in flags}


@pytest.fixture(scope="module")
def sample() -> Answers:
    return read_rows(SAMPLE)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return read_rows(READ)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trained, Trained]]:
    return train_with_rows(tmp_path_factory.mktemp("trainings"), IN_TRAININGS)


def test_each_flag_has_a_row(arguments: dict[str, str]) -> None:
    flags = {row.flag for row in ROWS}
    assert not flags - set(arguments), "rows of flags that do not exist"
    surveyed = {arguments[flag] for flag in flags}
    assert not {flag for flag, argument in arguments.items() if argument not in surveyed}, "flags without a row"


def test_rows_stand_once() -> None:
    names = [row.name for row in ROWS]
    assert not {name for name in names if names.count(name) > 1}


def test_tests_give_the_flags_that_they_are_listed_with() -> None:
    texts = {row.because: (ROOT / row.because).read_text(encoding="utf-8") for row in ROWS if row.changes == TESTED}
    assert not [row.name for row in ROWS if row.changes == TESTED and row.flag not in texts[row.because]]


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.name)
def test_a_row_of_each_kind_is_right(row: Row, sample: Answers, arguments: dict[str, str]) -> None:
    check(row, sample, arguments)


@pytest.mark.full
@pytest.mark.parametrize("row", READ, ids=lambda row: row.name)
def test_all_rows_are_right(row: Row, answers: Answers, arguments: dict[str, str]) -> None:
    check(row, answers, arguments)


@pytest.mark.full
@pytest.mark.parametrize("row", IN_TRAININGS, ids=lambda row: row.name)
def test_a_training_shows_the_flag(row: Row, trainings: dict[str, tuple[Trained, Trained]]) -> None:
    without, found = trainings[row.line]
    trace = row.trace.removeprefix("no ")
    assert found.has(trace) == (trace == row.trace)
    assert without.has(trace) != found.has(trace)


@pytest.mark.full
def test_each_flag_that_needs_another_is_surveyed_without_it(answers: Answers, arguments: dict[str, str]) -> None:
    refused = [answer for answer in answers.values() if isinstance(answer, str)]
    needing = [row.flag for row in UNUSED_REFUSALS if row.flag.split()[0] in arguments]
    assert not [flag for flag in needing if not any(f" {flag}: " in answer for answer in refused)]


def check(row: Row, answers: Answers, arguments: dict[str, str]) -> None:
    """Check that a row's line without the row's words is accepted, and that the words change what the row says."""
    without, found = answers[key_of(row, with_words=False)], answers[key_of(row)]
    assert not isinstance(without, str), without
    if row.changes == REFUSED:
        assert isinstance(found, str), "accepted"
        assert not found.startswith("FAILED"), found
        names = (row.names,) if row.names else (row.flag, arguments[row.flag], arguments[row.flag].replace("_", "-"))
        assert any(name in found for name in names), found
        return
    assert not isinstance(found, str), found
    changed = [reading for reading in READINGS if found.get(reading) != without.get(reading)]
    if row.changes == NOTHING:
        assert not changed
    else:
        assert row.changes in changed
        assert row.changes not in NEED_REASON or changed == [row.changes]
