"""``bytescale data``: the table of its subcommands."""

from __future__ import annotations

import argparse

from megatron.bytescale.cli.data import clean, mix, sculpt

NAME = "data"
HELP = "prepare a corpus for long contexts: clean it, mix its sources, make windows of related documents"
EXAMPLE = sculpt.EXAMPLE

COMMANDS = (clean, mix, sculpt)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    subparsers = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = subparsers.add_parser(
            command.NAME, help=command.HELP, description=command.HELP, epilog=f"example: {command.EXAMPLE}"
        )
        command.add_arguments(sub)
        sub.set_defaults(run_data=command.run, prog=sub.prog)


def run(args: argparse.Namespace) -> int:
    """Run one subcommand and return its exit code."""
    return int(args.run_data(args))
