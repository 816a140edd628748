"""Reports bad input in one line, whether Megatron or this package detects it.

Under torchrun the line is also the reason of the failed rank in torchrun's last lines: torchrun reads the file that
``TORCHELASTIC_ERROR_FILE`` names.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Final

from bytescale_ext.errors import LONGEST, one_line
from bytescale_ext.json_input import printable
from bytescale_ext.new_file import write_text
from megatron.bytescale.arguments.megatron_errors import in_flags

TRACEBACK: Final = "--traceback"
"""Word of a command line that prints the calls that led to an error; the training does not read it."""


class Refused(ValueError):
    """Settings or files that a run refuses, one reason each; all reasons that were found."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = reasons


class Reasons:
    """The reasons of a refusal, collected over several checks."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, *reasons: str) -> None:
        """Add reasons that are not there yet."""
        self.found += [reason for reason in reasons if reason not in self.found]

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Collect the reasons of a ValueError. After the first reason, other errors may follow from it: drop them."""
        try:
            yield
        except ValueError as error:
            self.add(*reasons_of(error))
        except Exception:
            if not self.found:
                raise

    def refuse(self) -> None:
        """Raise ``Refused`` with all reasons, if there are any."""
        if self.found:
            raise Refused(*self.found)


def reasons_of(error: ValueError) -> tuple[str, ...]:
    """Return the reasons of an error, one line of at most ``LONGEST`` characters each."""
    reasons = error.reasons if isinstance(error, Refused) else (str(error),)
    return tuple(one_line(reason, LONGEST) for reason in reasons)


def _is_first_process() -> bool:
    """Return whether this is the first process of its machine, all of which find the same bad input."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextlib.contextmanager
def one_line_errors(
    program: str, kind: type[ValueError] = ValueError, prints: Callable[[str], bool] | None = None
) -> Iterator[None]:
    """Turn an error of ``kind`` into one line per reason and exit code 2.

    ``prints``: returns whether this process prints a message; by default the first process of each machine does.
    """
    try:
        yield
    except kind as error:
        reasons = reasons_of(error)
        write_error_file("; ".join(reasons))
        if prints(str(error)) if prints is not None else _is_first_process():
            if TRACEBACK in sys.argv:
                traceback.print_exc()
            for reason in reasons:
                print(f"{program}: error: {printable(reason)}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def without_import_warnings() -> Iterator[None]:
    """Hide the warnings of Megatron's import about each missing optional package, and torch's about nvcc."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write_error_file(message: str) -> None:
    """Write the reason of a failure for torchrun, if torchrun has started this process.

    torchrun prints ``py_callstack`` if there is one, even an empty one, and ``message`` otherwise.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    content = {"message": {"message": printable(message), "extraInfo": {"timestamp": str(int(time.time()))}}}
    with contextlib.suppress(OSError):
        write_text(path, json.dumps(content))


@contextlib.contextmanager
def refusals_of_megatron() -> Iterator[None]:
    """Convert Megatron's errors about arguments, which have several types, to a ValueError of one line."""
    try:
        yield
    except (AssertionError, RuntimeError, OSError, ImportError, KeyError, TypeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, ValueError) and is_ours(last.filename):
            raise
        text = str(error) or f"this must hold: {last.line}"  # many of its asserts have no message
        raise ValueError(f"Megatron refuses these arguments: {in_flags(text)}") from error


def is_ours(filename: str) -> bool:
    """Return whether a source file belongs to this project."""
    return "/megatron/bytescale/" in filename or "/bytescale_ext/" in filename
