"""``flags.toml``: each flag of Megatron is honoured, refused, or has no effect in Megatron's own script.

The table is compared with the parser, the configurations of our path, the sources of Megatron and of this project, and
the table of refusals. A new flag, or a flag with a wrong entry, fails.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from megatron.bytescale.arguments.refusals import ALWAYS, REFUSALS
from megatron.bytescale.features import refusals
from tests.bytescale.arguments.flag_survey import Survey, megatron_folder, names_declared, names_read, survey
from tests.bytescale.arguments.test_refusals import LATER
from tests.e2e.training import HDP, MODEL, TRAIN
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[3]
TABLE: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("flags.toml").read_text(encoding="utf-8"))
BASES = ("refused", "config", "read", "ours", "tested", "checks", "without_effect")
COMMON = [*MODEL, *TRAIN, "--data-path", "unread", "--cpu"]
FEATURES = {
    "hdp": [*COMMON, *HDP],
    "slices": [*COMMON, "--seq1f1b-slices", "4"],
    "activations": [*COMMON, "--activation-policy", "memo", "--host-memory-gb", "0.1"],
}
CHOOSES_A_FILE_OR_CLASS = {  # functions that make configurations read these, but no field has their value
    "--cp-comm-type", "--heterogeneous-layers-config-path", "--rope-type", "--spec", "--te-precision-config-file",
}  # fmt: skip
STOCK_OPTIONS = {
    "arguments/data.py": ("SampleArguments", "MiddleArguments"),
    "arguments/running.py": ("SampleBatches", "LossChecks"),
}
READ_IN_CHECKS_ONLY = "training/arguments.py"


def entries(section: str) -> list[tuple[str, str]]:
    """Return (key, flag) of each flag of a section."""
    return [(key, flag) for key, flags in TABLE[section].items() for flag in flags.split()]


@pytest.fixture(scope="module")
def known() -> Survey:
    found: Survey = run_ranks(survey, 1, FEATURES, init_group=False)[0]
    return found


@pytest.fixture(scope="module")
def dests(known: Survey) -> dict[str, str]:
    """Return the argument of each flag."""
    return {flag: dest for dest, flags in known.flags.items() for flag in flags}


def flags_refused_by(column: str) -> set[str]:
    return {row.flag.split()[0] for row in refusals() if column in row.instead}


def test_each_flag_of_the_parser_stands_once_in_the_table(dests: dict[str, str]) -> None:
    listed = [flag for section in BASES for _, flag in entries(section)]
    assert sorted(listed) == sorted(dests)


def test_configurations_hold_what_was_given(known: Survey, dests: dict[str, str]) -> None:
    missing = [
        (name, flag)
        for name, flag in entries("config")
        if not any(field.startswith(f"{name}.") for field in known.fields.get(dests[flag], []))
    ]
    assert not missing


def test_files_of_megatron_read_what_they_are_listed_with(known: Survey, dests: dict[str, str]) -> None:
    wrong = [(file, flag) for file, flag in entries("read") if file not in known.readers.get(dests[flag], [])]
    assert not wrong
    wrong = [(file, flag) for file, flag in entries("checks") if file not in known.readers.get(dests[flag], [])]
    assert not wrong


def test_flags_with_other_names_change_a_configuration(known: Survey, dests: dict[str, str]) -> None:
    flags = [flag for file, flag in entries("read") if file == "training/argument_utils.py"]
    assert {flag for flag in flags if dests[flag] not in known.changes} == CHOOSES_A_FILE_OR_CLASS


def test_files_of_ours_read_what_they_are_listed_with(dests: dict[str, str]) -> None:
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in {*TABLE["ours"], *TABLE["tested"]}}
    read = {file: names_declared(text) for file, text in texts.items()}
    assert not [(file, flag) for file, flag in entries("ours") if dests[flag] not in read[file]]
    assert not [(file, flag) for file, flag in entries("tested") if flag not in re.findall(r"--[\w-]+", texts[file])]


def test_refused_flags_are_refused_without_a_condition() -> None:
    rows = {row.flag for row in REFUSALS if ALWAYS in row.instead}
    assert {flag for _, flag in entries("refused")} == {flag for flag in rows - LATER if " " not in flag}


def test_flags_that_nobody_reads_reach_nothing(known: Survey, dests: dict[str, str]) -> None:
    nobody = [
        flag for reader, flag in entries("without_effect") if reader.startswith(("nobody", "Megatron's get_model"))
    ]
    assert nobody
    for flag in nobody:
        assert dests[flag] not in known.fields, flag
        assert set(known.readers.get(dests[flag], [])) <= {READ_IN_CHECKS_ONLY}, flag


def test_flags_of_other_programs_name_the_switch_that_is_refused() -> None:
    refused = {flag for _, flag in entries("refused")}
    named = {flag for reader in TABLE["without_effect"] for flag in re.findall(r"--[\w-]+", reader)}
    assert named
    assert named <= refused


@pytest.mark.parametrize("feature", ["device", *FEATURES])
def test_features_set_what_is_listed_and_nothing_else(feature: str, known: Survey, dests: dict[str, str]) -> None:
    assert {dests[flag] for flag in TABLE["set"][feature].split()} == known.set_by[feature]


def stock_only(feature: str) -> set[str]:
    """Return the arguments that stock training reads in code that a feature replaces.

    Slices and activation policies replace Megatron's attention. Documents also replace its data sets and loaders.
    """
    ours, core = ROOT / "megatron" / "bytescale", megatron_folder() / "core"
    attention = (core / "transformer" / "dot_product_attention.py").read_text(encoding="utf-8")
    read = set(re.findall(r"config\.(\w+)", attention))
    if feature == "hdp":
        loaders = (core.parent / "training" / "datasets" / "data_samplers.py").read_text(encoding="utf-8")
        read |= names_read(loaders)
        for file, classes in STOCK_OPTIONS.items():
            read |= names_declared((ours / file).read_text(encoding="utf-8"), classes)
    files = [*(ours / "features" / feature).glob("*.py"), ours / "core" / "transformer" / "dot_product_attention.py"]
    files.append(ours / "arguments" / "setup.py")
    for text in (file.read_text(encoding="utf-8") for file in files):
        read -= names_read(text) | names_declared(text) | set(re.findall(r"(?:config|current\(\w+\))\.(\w+)", text))
    return read


@pytest.mark.parametrize("feature", ["hdp", "slices", "activations"])
def test_what_only_stock_training_reads_is_refused_set_or_listed(
    feature: str, known: Survey, dests: dict[str, str]
) -> None:
    settled = flags_refused_by(feature) | flags_refused_by(ALWAYS) | {flag for _, flag in entries("replaced")}
    settled |= set(TABLE["set"][feature].split())
    settled_dests = {dests[flag] for flag in settled if flag in dests}
    left = stock_only(feature) & set(known.flags) - settled_dests
    assert not {dest for dest in left if not dest.startswith("fim_")}
