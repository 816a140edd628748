"""The parser of ``bytescale``, the types of its options, and the checks that come before any work."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final, NoReturn

_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST_TOKENS: Final = 1 << 40
MOST_RANKS: Final = 1 << 20
PICTURES: Final = (".png", ".svg", ".pdf")


class UsageError(ValueError):
    """Options that cannot be read.

    Attributes:
        prog: the command that was called.
    """

    def __init__(self, prog: str, message: str) -> None:
        super().__init__(message)
        self.prog = prog


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are a UsageError; its subparsers are of the same class."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(self.prog, f"{message} ({self.prog} --help lists the options)")


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


def add_optimizer_ranks(parser: argparse.ArgumentParser) -> None:
    """Add ``--optimizer-ranks``."""
    parser.add_argument(
        "--optimizer-ranks",
        type=count,
        default=1,
        metavar="N",
        help="ranks that share the optimizer's states, as --use-distributed-optimizer does (1)",
    )


def add_link(parser: argparse.ArgumentParser) -> None:
    """Add ``--link-gb-per-second``."""
    parser.add_argument("--link-gb-per-second", type=float, default=55.0, metavar="B", help="to host, one way (55)")


def check_writable(flag: str, path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Raise ValueError if ``path`` cannot be written, or has none of ``suffixes`` where these are given.

    An existing file keeps its content; a new one is removed again.
    """
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"{flag} {path}: give a name that ends with {', '.join(suffixes[:-1])} or {suffixes[-1]}")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path} cannot be written: there is no folder {path.parent}")
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written ({error.strerror})") from error
    if is_new:
        path.unlink(missing_ok=True)


def check_picture(flag: str, path: Path | None) -> None:
    """Raise ValueError if a picture was asked for that cannot be written to ``path``."""
    if path is not None:
        check_writable(flag, path, PICTURES)
