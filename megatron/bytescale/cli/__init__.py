"""The console command ``bytescale`` and the table of its subcommands.

Each row is a module with NAME, HELP, EXAMPLE, ``add_arguments`` and ``run``. A new subcommand (next: ``search`` for
parallel strategies) is one module here and one row.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from megatron.bytescale.cli import activations, corpus, doctor, memory_plan, plan, profile, schedule, simulate, timeline

COMMANDS = (corpus, profile, plan, simulate, schedule, activations, memory_plan, timeline, doctor)


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``bytescale`` with all its subcommands."""
    top = argparse.ArgumentParser(
        prog="bytescale", description="Long-context training on Megatron: data, plans, pictures, diagnosis."
    )
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = subparsers.add_parser(
            command.NAME, help=command.HELP, description=command.HELP, epilog=f"example: {command.EXAMPLE}"
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. Bad input gives one line on standard error and exit code 2."""
    args = parser().parse_args(argv)
    warnings.simplefilter("ignore")  # on import Megatron warns about every missing optional package
    try:
        return int(args.run(args))
    except ValueError as error:
        print(f"bytescale {args.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the pipe, such as head, has ended
        sys.stderr.close()
        return 0
