"""Output without control characters of others: names of files, texts in files and arguments in checkpoints are shown.

A terminal obeys escape sequences: they rewrite lines that were printed before, or the title of a window.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import IO, Any, cast

_OBEYED = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)  # controls except tab, newline and carriage return; directions of text; what UTF-8 cannot write


class EscapedStream:
    """A text stream that escapes what a terminal would obey. Everything else is the stream below.

    Attributes:
        below: stream that takes texts as they are.
    """

    def __init__(self, below: IO[str]) -> None:
        self.below = below

    def write(self, text: str) -> int:
        """Write a text; return its number of characters before escapes."""
        self.below.write(_OBEYED.sub(lambda found: repr(found[0])[1:-1], text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


def escape_output() -> None:
    """Escape what this process writes to standard output and standard error from now on."""
    sys.stdout, sys.stderr = _escaped(sys.stdout), _escaped(sys.stderr)


def _escaped(stream: IO[str]) -> IO[str]:
    """Return a stream that escapes; a program without a console has None."""
    is_plain = stream is not None and not isinstance(stream, EscapedStream)
    return cast("IO[str]", EscapedStream(stream)) if is_plain else stream


@contextlib.contextmanager
def escaped_output() -> Iterator[None]:
    """Escape what the block writes to standard output and standard error."""
    before = sys.stdout, sys.stderr
    escape_output()
    inside = sys.stdout, sys.stderr
    try:
        yield
    finally:
        if sys.stdout is inside[0]:
            sys.stdout = before[0]
        if sys.stderr is inside[1]:
            sys.stderr = before[1]


def stream_of_program(stream: IO[str]) -> IO[str]:
    """Return the stream for escape sequences of the program itself, such as a progress bar without texts of others."""
    return stream.below if isinstance(stream, EscapedStream) else stream


def stream_of_texts(stream: IO[str]) -> IO[str]:
    """Return the stream for texts that were asked for: escaped on a terminal, as they are in a file or a pipe."""
    if isinstance(stream, EscapedStream) and not stream.isatty():
        return stream.below
    return stream
