"""JSON that users give. Python's parser fails with another error for deep nesting than for other bad text."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final

_LARGEST = 1 << 63
_SMALL: Final = 16 << 20  # bytes of a file that may have holes
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # escape sequences and bytes
Pairs = Callable[[list[tuple[str, object]]], object]
"""Makes the value of a JSON object from its (name, value) pairs."""


def check_stored(path: str | Path) -> None:
    """Raise OSError for a file without an end, and for a large file with holes, which needs more memory than it takes.

    Pipes have no end, nor devices such as ``/dev/zero``, and a file of the kernel, such as ``/proc/self/pagemap``, may
    have 0 bytes and content without end. Pipes of a shell, below ``/dev``, pass, and ``/dev/null``.
    """
    status = os.stat(path)
    is_null = os.path.exists(os.devnull) and os.path.samestat(status, os.stat(os.devnull))
    if (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)) and not is_null:
        raise OSError(errno.EINVAL, "it is a device", str(path))
    if stat.S_ISFIFO(status.st_mode) and not os.fspath(path).startswith("/dev/"):
        raise OSError(errno.EINVAL, "it is a pipe", str(path))
    if stat.S_ISREG(status.st_mode) and not status.st_size and _has_content(path):
        raise OSError(errno.EINVAL, "it has content and a size of 0, so it is no stored file", str(path))
    if not stat.S_ISREG(status.st_mode) or status.st_size <= _SMALL or not hasattr(os, "SEEK_HOLE"):
        return
    with open(path, "rb") as file:
        try:
            first_hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
        except OSError:  # the file system knows no holes
            return
    if first_hole < status.st_size:
        raise OSError(errno.EINVAL, f"it has {status.st_size:,} bytes, of which not all are stored", str(path))


def _has_content(path: str | Path) -> bool:
    """Return whether bytes of a file can be read now; files of the kernel may wait for some."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return bool(os.read(file, 4096))  # pagemap gives multiples of 8 bytes only
    finally:
        os.close(file)


def stored_bytes(path: str | Path) -> bytes:
    """Return the bytes of a file. Raises OSError as ``check_stored``."""
    check_stored(path)
    return Path(path).read_bytes()


def stored_text(path: str | Path, errors: str = "strict") -> str:
    """Return the text of a file of UTF-8. Raises OSError as ``check_stored``."""
    check_stored(path)
    return Path(path).read_text(encoding="utf-8", errors=errors)


def json_value(text: str | bytes, object_pairs_hook: Pairs | None = None, is_strict: bool = False) -> Any:
    """Return a JSON value. Raises ValueError for text that is not JSON, not UTF-8, or nested too deeply.

    ``is_strict``: NaN and Infinity, which Python reads and JSON lacks, are errors too.
    """
    try:
        return json.loads(
            text, object_pairs_hook=object_pairs_hook, parse_constant=_refuse_constant if is_strict else None
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_characters(line: bytes, value: object) -> None:
    """Raise ValueError if the value of a line of JSON has half of a surrogate pair, which is no character.

    JSON allows it and UTF-8 does not.
    """
    if not _SURROGATE.search(line):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"{error.object[error.start]!a} is half of a surrogate pair") from None


def json_settings(text: str | bytes) -> Any:
    """Return a JSON value whose integers fit into 64 bits, for settings, costs and plans.

    Raises ValueError as ``json_value``, and for integers above 2^63.
    """
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > _LARGEST:
        raise ValueError(f"the number {text[:20]}{'...' * (len(text) > 20)} is larger than 2^63")
    return int(text)


def whole(value: object) -> int:
    """Return an integer of a JSON value. Raises TypeError for anything else: ``true``, a fraction, a text."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{json.dumps(value, default=repr)[:40]} is not a whole number")
    return int(value)


def real(value: object) -> float:
    """Return a number of a JSON value. Raises TypeError for anything else: ``true``, a text."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{json.dumps(value, default=repr)[:40]} is not a number")
    return float(value)


def printable(text: str) -> str:
    """Return a text with its control characters escaped, so that a file's name cannot write to a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def lines_of_text(text: str) -> list[str]:
    """Return the lines of a text, which end at newlines alone: other separators of Unicode are part of a line."""
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def _refuse_constant(name: str) -> object:
    """Raise ValueError for a number that JSON lacks."""
    raise ValueError(f"{name} is no number of JSON")


def finite(value: object, most: int = 200) -> object:
    """Return a value of JSON with None in place of NaN and infinity, which JSON lacks.

    Raises ValueError for a value nested more than ``most`` times, which Python could read but not write.
    """
    if most < 0:
        raise ValueError("nested too deeply")
    if isinstance(value, Mapping):
        return {key: finite(each, most - 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each, most - 1) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
