"""The console command ``bytescale`` and the table of its subcommands.

Each row is a module with NAME, HELP, EXAMPLE, ``add_arguments`` and ``run``. A new subcommand is one module here, or
a folder with a module ``command``, and one row.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from bytescale_ext.errors import LONGEST, one_line
from bytescale_ext.json_input import printable
from bytescale_ext.new_file import FULL
from bytescale_ext.terminal import escaped_output
from megatron.bytescale.arguments.bad_input import reasons_of
from megatron.bytescale.arguments.renamed import refuse_words
from megatron.bytescale.cli import (
    activations,
    convert,
    corpus,
    doctor,
    draft,
    dry_run,
    logprobs,
    memory_plan,
    ngram,
    plan,
    profile,
    schedule,
    simulate,
    timeline,
    train,
)
from megatron.bytescale.cli.data import command as data
from megatron.bytescale.cli.experts import command as experts
from megatron.bytescale.cli.generate import command as generate
from megatron.bytescale.cli.search import command as search
from megatron.bytescale.cli.shared.inputs import OneLineParser, UsageError
from megatron.bytescale.cli.states import command as states
from megatron.bytescale.protection import protect_process
from megatron.bytescale.versions import version_of

COMMANDS = (
    train,
    corpus,
    data,
    profile,
    dry_run,
    plan,
    search,
    simulate,
    schedule,
    activations,
    states,
    ngram,
    experts,
    memory_plan,
    timeline,
    logprobs,
    generate,
    draft,
    convert,
    doctor,
)


def parser() -> OneLineParser:
    """Return the parser of ``bytescale`` with all its subcommands."""
    top = OneLineParser(
        prog="bytescale", description="Long-context training on Megatron: data, plans, pictures, diagnosis."
    )
    top.add_argument("--version", action=_Version, nargs=0, help="print the versions and end")
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = subparsers.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.HELP,
            epilog=f"example: {command.EXAMPLE}",
            add_help=command is not train,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, prog=sub.prog)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 2 for bad input, after one line on standard error."""
    protect_process()
    with escaped_output():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    prog = "bytescale"
    warnings.simplefilter("ignore")  # Megatron warns on import about each missing optional package
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # and torch about nvcc without a GPU
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its warnings quote files as they are
    try:
        args = parse(argv)
        prog = args.prog
        code = int(args.run(args))
        sys.stdout.flush()  # a full device raises here
        return code
    except UsageError as error:
        return _refused(error.prog, str(error))
    except ValueError as error:
        return _refused(prog, *reasons_of(error))
    except BrokenPipeError:  # the reader of the pipe, such as head, has ended
        sys.stderr.close()
        return 0
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # so that Python does not write again at exit
        place = error.filename or ("standard output" if error.errno in FULL else None)
        return _refused(prog, f"{place}: {error.strerror}" if place else str(error.strerror or error))
    except MemoryError:
        return _refused(prog, "this machine has not enough memory for the input")
    except KeyboardInterrupt:
        print(f"{prog}: stopped", file=sys.stderr)
        return 130


def _refused(prog: str, *reasons: str) -> int:
    for reason in reasons:
        print(f"{prog}: error: {printable(one_line(reason, LONGEST))}", file=sys.stderr)
    return 2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command line. The options of ``train`` stay words, in ``flags``.

    Raises:
        UsageError: an option is unknown, renamed, missing or of another type.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _check_renamed(words)
    args, rest = parser().parse_known_args(words)
    if args.command == train.NAME:
        args.flags = rest
    elif rest:
        raise UsageError(args.prog, f"it has no option {rest[0]} ({args.prog} --help lists the options)")
    return args


def _check_renamed(words: Sequence[str]) -> None:
    """Raise UsageError for an option of a subcommand in its old spelling."""
    name = " ".join(words[: 2 if words[:1] == [data.NAME] else 1])
    options = words[: words.index("--")] if "--" in words else words
    try:
        refuse_words(options, name)
    except ValueError as error:
        raise UsageError(f"bytescale {name}", str(error)) from None


class _Version(argparse.Action):
    """Print the versions that a bug report needs; they are read only for this option."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        names = ("bytescale-megatron", "megatron-core", "torch")
        print(", ".join(f"{name} {version_of(name) or 'not installed'}" for name in names))
        parser.exit()
