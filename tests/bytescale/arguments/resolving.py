"""Resolution of command lines by Megatron's real parser and checks, without tokenizer and data."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.harness import run_ranks


@dataclass(frozen=True)
class Resolved:
    """Result of a command line: features by name, plain arguments and choices, or the line of a refusal."""

    features: dict[str, Any]
    args: dict[str, Any]
    error: str | None = None
    decision: Any = None


def resolve_lines(*lines: tuple[int, Sequence[object]]) -> list[Resolved]:
    """Return the result of each (number of processes, words), in one process for all."""
    words = [(num_processes, [str(word) for word in line]) for num_processes, line in lines]
    found: list[Resolved] = run_ranks(_resolve_lines, 1, words, init_group=False)[0]
    return found


def resolved(num_processes: int, *words: object) -> Resolved:
    """Return the result of a command line, which must be accepted."""
    (found,) = resolve_lines((num_processes, words))
    assert found.error is None, found.error
    return found


def refused(num_processes: int, *words: object) -> str:
    """Return the error line of a refused command line."""
    (found,) = resolve_lines((num_processes, words))
    assert found.error is not None, found.features
    return found.error


def check_refused(*rows: tuple[int, Sequence[object], str]) -> None:
    """Check that launch lines, resolved in one process, are refused, with one line for each reason.

    A row is (number of processes, words of the line, parts of one of the reasons separated by bars).
    """
    found = resolve_lines(*((num_processes, words) for num_processes, words, _ in rows))
    for outcome, (_, words, message) in zip(found, rows, strict=True):
        assert outcome.error is not None, words
        reasons, parts = outcome.error.split("\n"), message.split("|")
        assert all(reasons)
        assert any(all(part in reason for part in parts) for reason in reasons), (words, reasons)


def _resolve_lines(rank: int, world: int, lines: Sequence[tuple[int, list[str]]]) -> list[Resolved]:
    return [_resolve(num_processes, words) for num_processes, words in lines]


def checked(num_processes: int, words: Sequence[str], vocab: int = 128, **settled: object) -> argparse.Namespace:
    """Return arguments after the checks of Megatron and our features; ``settled``: values set before the checks."""
    from megatron.training.arguments import parse_args, validate_args

    from megatron.bytescale import features
    from megatron.bytescale.arguments import parse

    os.environ["WORLD_SIZE"] = str(num_processes)
    sys.argv = ["pretrain_gpt_hdp.py", *words]
    with parse.refusals_of_megatron():
        args = parse_args(parse.add_arguments)
    vars(args).update(settled)
    parse.set_device_defaults(args, sys.argv, on_cpu=True)
    features.check(args)
    with parse.refusals_of_megatron():
        validate_args(args)
    features.check_after(args)
    args.padded_vocab_size = args.padded_vocab_size or vocab  # the tokenizer sets it
    return args


def _resolve(num_processes: int, words: list[str]) -> Resolved:
    from megatron.bytescale.arguments.resolve import resolve

    try:
        args = checked(num_processes, words)
        plain = {
            name: value for name, value in vars(args).items() if isinstance(value, bool | int | float | str | None)
        }
        run = resolve(args)
        return Resolved(dict(run.features), plain, decision=run.decision)
    except ValueError as error:
        return Resolved({}, {}, str(error))
    except SystemExit:
        return Resolved({}, {}, "argparse refuses it")
