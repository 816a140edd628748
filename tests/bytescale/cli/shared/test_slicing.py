"""Options of slices: their settings, and refused values."""

from __future__ import annotations

import argparse

import pytest

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.evaluate.slicing_choice import SlicingChoice
from bytescale_ext.plan.setup.choose import choose
from bytescale_ext.plan.setup.setup import Setup
from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale.cli.shared.slicing import (
    add_setup_arguments,
    add_slices_arguments,
    setup_of_options,
    slicing_of_options,
)

COST = shipped("bytescale_7b")


def setup(words: str, stages: int = 4) -> Setup:
    parser = argparse.ArgumentParser()
    add_setup_arguments(parser)
    options = f"--ranks 16 --tokens-per-rank 8192 --pipeline-parallel {stages} {words}"
    return setup_of_options(parser.parse_args(options.split()), COST, 65536)


def slicing(words: str, stages: int = 4) -> Slicing:
    return setup(words, stages).given_slicing


def test_slices_without_keys() -> None:
    parser = argparse.ArgumentParser()
    add_slices_arguments(parser, "slices")
    assert slicing_of_options(parser.parse_args([])) == Slicing()
    assert slicing_of_options(parser.parse_args(["--slices", "3", "--eager"])) == Slicing(3, eager=True)


def test_kept_keys_are_those_given_or_those_of_training() -> None:
    assert slicing("") == Slicing()
    assert slicing("--slices 2 --kept-keys 7") == Slicing(2, 7)
    assert slicing("--slices 2 --kept-keys 7 --swapped-keys 9") == Slicing(2, 7, swapped_tokens=9)
    assert slicing("--slices 3").kept_tokens > slicing("--slices 3 --eager").kept_tokens > 0


@pytest.mark.parametrize(
    ("words", "stages", "message"),
    [
        ("--kept-keys 5", 4, "--kept-keys 5 must be at least 0, and needs --slices"),
        ("--slices 2 --kept-keys -1", 4, "--kept-keys -1 must be at least 0"),
        ("--slices 2 --host-memory-gb 80", 4, "--host-memory-gb needs --slices auto"),
        ("--swapped-keys 5", 4, "--swapped-keys 5 must be at least 0, and needs --slices"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: str, stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slicing(words, stages)


def choice(words: str, stages: int = 4) -> SlicingChoice:
    slices = choose(setup(words, stages)).slices
    assert isinstance(slices, SlicingChoice)
    return slices


def test_the_planner_chooses_within_the_memory_of_a_device() -> None:
    assert choose(setup("--slices 2")).slices is None
    found = choice("--slices auto --device-memory-gb 80")
    assert found.device_bytes == 80e9
    assert all(states > 0 for states in found.memory.state_bytes)
    assert found.host_bytes == 0
    in_host = choice("--slices auto --device-memory-gb 80 --host-memory-gb 200")
    assert in_host.host_bytes == 200e9


@pytest.mark.parametrize(
    ("words", "stages", "message"),
    [
        ("--slices auto --device-memory-gb -1", 4, "--slices auto needs --device-memory-gb"),
        ("--slices auto --device-memory-gb 80 --swapped-keys 9", 4, "chooses --kept-keys, --swapped-keys and"),
        (
            "--slices auto --device-memory-gb 80 --host-memory-gb -1",
            4,
            "--host-memory-gb -1 is not an amount",
        ),
        ("--slices auto --device-memory-gb 2", 4, "take at least"),
    ],
)
def test_choices_that_do_not_fit_are_refused(words: str, stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choice(words, stages)
