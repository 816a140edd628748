"""Reports bad input in one line, whether Megatron or this package detects it."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

from bytescale_ext.json_input import printable


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Turn a ValueError into one line, printed by the first process of each machine, and exit code 2."""
    try:
        yield
    except ValueError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{program}: error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def refusals_of_megatron() -> Iterator[None]:
    """Convert Megatron's errors about arguments, which have several types, to a ValueError of one line."""
    try:
        yield
    except (AssertionError, RuntimeError, OSError, ImportError, KeyError, TypeError) as error:
        broken = traceback.extract_tb(error.__traceback__)[-1].line  # many of its asserts have no message
        reason = " ".join((str(error) or f"this must hold: {broken}").split())
        raise ValueError(f"Megatron refuses these arguments: {reason}") from error
