"""Writes files in folders that others may share: under a name that nobody can guess, or never through a link.

A link that somebody else planted under the name of a file would let them choose what we overwrite. So a file is created
exclusively under a random name and renamed when it is complete. Only this module creates files for writing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk without room; writing to an open file raises them without a name."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], is_binary: bool = False) -> Iterator[IO[Any]]:
    """Yield a new file, text in UTF-8 by default, which replaces ``path`` when it is complete.

    After an error ``path`` keeps its content. A link at ``path`` is replaced, and its target stays as it is. A device
    or a pipe is written in place. Raises OSError if the file cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        with _named(path), _stream(os.open(path, os.O_WRONLY | os.O_CLOEXEC), is_binary) as stream:
            yield stream
        return
    part = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.partial")
    try:
        handle = os.open(part, _NEW, 0o666)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with _named(path), _stream(handle, is_binary) as stream:
            yield stream
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text, complete or not at all. Raises OSError if it cannot be written."""
    with new_file(path) as file:
        file.write(text)


def new_log(path: str | os.PathLike[str], is_binary: bool = False) -> IO[Any]:
    """Replace the file at ``path`` by an empty one, and return it opened: a log that grows under its own name.

    Raises OSError if somebody else creates the file at the same time, or it cannot be written.
    """
    path = Path(path)
    path.unlink(missing_ok=True)
    return _stream(os.open(path, _NEW, 0o666), is_binary)


def appended(path: str | os.PathLike[str]) -> IO[Any]:
    """Open a text file to append to it. Raises OSError for a link, a pipe, or a file that cannot be written."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o666)
    if stat.S_ISFIFO(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.ENXIO, "is a pipe", str(path))
    return _stream(handle, is_binary=False)


def overwritten(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file of our own to overwrite some of its bytes. Raises OSError for a link and for a missing file."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b")


@contextlib.contextmanager
def private_folder(parent: str | os.PathLike[str], name: str) -> Iterator[Path]:
    """Yield a new folder in ``parent`` that only this user can enter, and remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix=f".{name[:100]}.", suffix=".partial", dir=parent))
    try:
        with _named(Path(parent) / name):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def locked_folder(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Let one thread of all processes at a time into the block; all at once on a file system without locks.

    Raises OSError if the folder cannot be opened.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def make_folder(folder: Path, top: Path) -> None:
    """Make a folder below ``top``, whose name the user gave. Raises OSError for a link between them."""
    _check_no_link(itertools.takewhile(lambda part: part != top, (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)


def make_own_folder(folder: Path) -> None:
    """Make a folder that only this user can enter, or keep it: other programs open files in it by name.

    Raises OSError for a link, the folder of another user, and a folder with links, which nobody could plant in ours.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        _check_no_link([folder])
        with tempfile.TemporaryFile(dir=folder) as ours:  # file systems may change the user of new files
            is_ours = os.fstat(ours.fileno()).st_uid == folder.stat().st_uid
        if not is_ours:
            raise OSError(errno.EPERM, "belongs to another user", str(folder)) from None
        with contextlib.suppress(OSError):  # file systems without modes
            folder.chmod(0o700)
        _check_no_link(folder.rglob("*"))


def check_writable_folder(folder: Path) -> None:
    """Create a folder if needed, and a file in it that is removed. Raises OSError if this fails."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".writable-", dir=folder)
    os.close(handle)
    os.unlink(name)


def _check_no_link(paths: Iterable[Path]) -> None:
    if link := next((path for path in paths if path.is_symlink()), None):
        raise OSError(errno.ELOOP, "is a link", str(link))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the path in the error of a full disk: writing to an open file raises one without a name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in FULL:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _stream(handle: int, is_binary: bool) -> IO[Any]:
    return os.fdopen(handle, "wb") if is_binary else os.fdopen(handle, "w", encoding="utf-8")
