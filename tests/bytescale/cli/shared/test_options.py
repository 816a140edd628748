"""The options that several subcommands have: equal everywhere, and none under another name."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from megatron.bytescale import cli
from megatron.bytescale.arguments.renamed import RENAMED, TRAINING
from megatron.bytescale.cli.shared.options import SHARED_OPTIONS, add_option


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options of a parser and its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from actions_of(sub)
        elif action.option_strings:
            yield action


@pytest.mark.parametrize("name", SHARED_OPTIONS)
def test_an_option_is_equal_in_all_commands(name: str) -> None:
    row = SHARED_OPTIONS[name]
    actions = [action for action in actions_of(cli.parser()) if name in action.option_strings and not action.choices]
    assert len(actions) > 1
    for action in actions:
        assert (action.type, action.metavar) == (row.kind, row.metavar)
        assert str(action.help).startswith(row.text)


def test_no_command_has_an_old_name() -> None:
    names = {flag for action in actions_of(cli.parser()) for flag in action.option_strings}
    old = {row.old for row in RENAMED if row.where != TRAINING}
    elsewhere = {"--launch", "--link-gb-per-second", "--policy"}  # options of other commands
    assert not names & (old - elsewhere)


def test_defaults_and_notes_are_in_the_help() -> None:
    parser = argparse.ArgumentParser()
    add_option(parser, "--micro-batches", note="for traffic")
    add_option(parser, "--seq-length", default=8192)
    add_option(parser, "--host-memory-gb")
    args = parser.parse_args([])
    assert (args.micro_batches, args.seq_length, args.host_memory_gb) == (1, 8192, None)
    helps = [str(action.help) for action in parser._actions[1:]]
    assert [text.partition("; for traffic")[1] for text in helps] == ["; for traffic", "", ""]
    assert [text.partition("(default: ")[2] for text in helps] == ["1)", "8192)", ""]
