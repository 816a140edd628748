"""The parser of ``bytescale``, the types of its options, and checks before any work."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NoReturn

from bytescale_ext.new_file import check_writable_folder

_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST_TOKENS: Final = 1 << 40
MOST_RANKS: Final = 1 << 20
DATA_SET: Final = (".bin", ".idx")  # end the names of the files of a data set
PICTURES: Final = (".png", ".svg", ".pdf")
MAY_BE_EMPTY: Final = ("prompt", "launch")
"""Options whose command says itself what it needs, or takes an empty text."""
_NO_NUMBER: Final = re.compile(r"[^\x00-\x7f]|\d_\d")
"""What Python reads as part of a number although nobody types it on purpose: other scripts' digits, ``1_0``."""


class UsageError(ValueError):
    """Options that cannot be read.

    Attributes:
        prog: the command that was called.
    """

    def __init__(self, prog: str, message: str) -> None:
        super().__init__(message)
        self.prog = prog


class HelpFormatter(argparse.HelpFormatter):
    """Wraps help at spaces only, because argparse also breaks flags at their hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are a UsageError; its subparsers are of the same class."""

    def _get_formatter(self) -> argparse.HelpFormatter:
        return HelpFormatter(prog=self.prog)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(self.prog, f"{message} ({self.prog} --help lists the options)")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert one value. Raises ArgumentError for an empty name or path, or for digits other than 0 to 9."""
        if action.type in (None, Path):
            if not arg_string and action.option_strings and action.dest not in MAY_BE_EMPTY:
                raise argparse.ArgumentError(action, "its value is empty")
        elif action.type is not str and _NO_NUMBER.search(arg_string):
            raise argparse.ArgumentError(action, f"{arg_string[:40]!r}: write numbers with the digits 0 to 9 only")
        return super()._get_value(action, arg_string)


def size(text: str) -> int:
    """Return a positive count; 8K is 8192.

    Raises:
        argparse.ArgumentTypeError: not a count, or more than ``MOST_TOKENS``.
    """
    try:
        number = int(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a size from 1 to 1024G; write for example 8192, 8K or 1M (K is 1024)"
        )
    return number


def size_text(number: int) -> str:
    """Return a positive count as ``size`` reads it: 8192 is 8K, and a count of no whole unit has all its digits."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if number % unit == 0:
            return f"{number // unit:,}{name}"
    return f"{number:,}"


def count(text: str) -> int:
    """Return a positive number of ranks, stages, steps or the like.

    Raises:
        argparse.ArgumentTypeError: not a whole number from 1 to ``MOST_RANKS``.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1 to {MOST_RANKS}")
    return number


def seed(text: str) -> int:
    """Return a seed of random numbers. Raises ArgumentTypeError if it is not a whole number from 0 to 2^32 - 1."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 32:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 0 to 2^32 - 1")
    return number


def launch_words(line: str) -> list[str]:
    """Return the words of a launch line. Raises ValueError if they name no script and do not begin with a flag."""
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise ValueError(f"--launch: not a command line ({error})") from error
    if not any(word.endswith(".py") for word in words) and not (words and words[0].startswith("--")):
        raise ValueError("--launch: give a command such as 'torchrun ... pretrain_gpt.py --num-layers 2'")
    return words


def check_writable(flag: str, path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Raise ValueError if ``path`` cannot be written, or if it has none of the given ``suffixes``.

    An existing file keeps its content, and a new file is removed again.
    """
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"{flag} {path}: give a name that ends with {', '.join(suffixes[:-1])} or {suffixes[-1]}")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path} cannot be written: there is no folder {path.parent}")
    try:
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
        else:
            check_writable_folder(path.parent)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written ({error.strerror})") from error


def check_apart(output: str | Path, files: Iterable[str | Path] = (), folders: Iterable[str | Path] = ()) -> None:
    """Raise ValueError if ``--output`` is one of the command's files, or inside one of its folders."""
    place = Path(output).resolve()
    for file in files:
        if place == Path(file).resolve():
            raise ValueError(f"--output {output} would overwrite the input {file}: give another name")
    for folder in folders:
        if Path(folder).is_dir() and place.is_relative_to(Path(folder).resolve()):
            raise ValueError(f"--output {output} is inside the source {folder}: give another folder")


def check_picture(flag: str, path: Path | None) -> None:
    """Raise ValueError if a picture cannot be written to ``path``; None: no picture."""
    if path is not None:
        check_writable(flag, path, PICTURES)


_LARGEST_SPEED: Final = 1e4
_MOST_RANKS: Final = 1 << 20


def speeds_value(text: str) -> tuple[float, ...]:
    """Return the speeds of ``1x8,0.5x8``, one for each rank. Raises ArgumentTypeError for anything else."""
    speeds: list[float] = []
    for part in text.split(","):
        speed, _, number = part.partition("x")
        try:
            ranks, value = int(number) if number else 1, float(speed)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is no speed; write 0.5, or 0.5x8 for 8 ranks") from None
        if not 1 / _LARGEST_SPEED <= value <= _LARGEST_SPEED or not 1 <= ranks <= _MOST_RANKS:
            raise argparse.ArgumentTypeError(
                f"{part!r}: speeds are from {1 / _LARGEST_SPEED} to {_LARGEST_SPEED:g}, of 1 to {_MOST_RANKS:,} ranks"
            )
        speeds += [value] * ranks
    return tuple(speeds)
