"""The file of a disk that holds pages: direct I/O, checksums, and two versions of which one is always whole.

A file belongs to one process, which holds a lock on it and removes it at its end. It is scratch: what a run goes on
from is Megatron's checkpoint, because pages in host memory are in no file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bytescale_ext.plan.states.tiers import BLOCK_BYTES, CHECKSUM_BYTES, HEADER_BYTES, NUM_VERSIONS, FileLayout

MAGIC: Final = b"bytescale pages\x01"
PATTERN: Final = "rank-*.pages"
_HEADER: Final = struct.Struct(f"<{len(MAGIC)}sQQQQI")  # step, pages, copies, bytes of a page, checksum of the others


class PagesDamaged(RuntimeError):
    """A page is not what was written; the run cannot go on."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a file says of its newest whole version.

    Attributes:
        step: of the optimizer.
        version: which one.
        layout: of the file.
        checksums: uint32 [pages of all planes]; 0 for pages that were never written.
    """

    step: int
    version: int
    layout: FileLayout
    checksums: np.ndarray


def file_of(folder: Path, rank: int, part: int) -> Path:
    """Return the file of a part of a rank's optimizer."""
    return folder / f"rank-{rank:05}-part-{part}.pages"


def read_record(path: Path) -> Record | None:
    """Return the newest whole record of a file, or None where it has none.

    Raises ValueError where the file is no file of pages.
    """
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if not head.strip(b"\0"):
            return None  # ended before its first record
        if len(head) < _HEADER.size or not head.startswith(MAGIC):
            raise ValueError(f"{path} is not a file of pages: remove it or give another folder")
        _, _, pages, copies, page_bytes, _ = _HEADER.unpack(head)
        layout = FileLayout(pages, copies, page_bytes)
        file.seek(0)
        records = [_record(file.read(layout.record_bytes), version) for version in range(NUM_VERSIONS)]
    return max((one for one in records if one is not None), key=lambda one: one.step, default=None)


def _record(content: bytes, version: int) -> Record | None:
    """Return a record, or None where it is torn or was never written."""
    if len(content) < HEADER_BYTES or not content.startswith(MAGIC):
        return None
    _, step, pages, copies, page_bytes, check = _HEADER.unpack_from(content)
    if _record_check(content) != check:
        return None
    layout = FileLayout(pages, copies, page_bytes)
    checksums = np.frombuffer(content, np.uint32, layout.version_pages, HEADER_BYTES)
    return Record(step, version, layout, checksums)


def _record_check(content: bytes) -> int:
    """Return the checksum of a record without the field that holds it."""
    return zlib.crc32(content[HEADER_BYTES:], zlib.crc32(content[: _HEADER.size - CHECKSUM_BYTES]))


def is_in_use(path: Path) -> bool:
    """Return whether a living process holds the file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def check_replaceable(path: Path) -> None:
    """Raise ValueError unless a file is one of pages that no living process uses."""
    try:
        read_record(path)
        in_use = is_in_use(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if in_use:
        raise ValueError(f"{path} belongs to another run, which uses it: give each run a folder of its own")


class PageFile:
    """The open file of one process, whose space is reserved when it is made.

    Attributes:
        path: where it is.
        layout: where pages lie in it.
        is_direct: reads and writes pass the cache of the operating system by.
    """

    def __init__(self, path: Path, layout: FileLayout) -> None:
        """Make the file, in place of one that a dead process has left.

        Raises ValueError where another process uses the file, it is no file of pages, or the disk is too small.
        """
        if path.exists():
            check_replaceable(path)
            path.unlink()
        self.path, self.layout = path, layout
        self._checksums = np.zeros((NUM_VERSIONS, layout.version_pages), np.uint32)
        self._is_known = np.zeros((NUM_VERSIONS, layout.version_pages), bool)
        handles: list[int] = []
        self._remove = weakref.finalize(self, _remove, handles, path, os.getpid())
        try:
            with _disk_errors(path, layout):
                handles.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                fcntl.flock(handles[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.posix_fallocate(handles[0], 0, layout.num_bytes)
                self._file = self._direct = handles[0]
                self.commit(0, 0)
                handles += _open_direct(path, layout.version_offset(0))
        except ValueError:
            self.close()
            raise
        self._direct = handles[-1]
        self.is_direct = len(handles) > 1

    def close(self) -> None:
        """Close and remove the file."""
        self._remove()

    def read(self, version: int, plane: int, page: int, buffer: np.ndarray) -> None:
        """Fill a buffer uint8 [page_bytes] that begins at a multiple of ``BLOCK_BYTES``.

        Raises PagesDamaged where the page is not what was written, OSError where the disk fails.
        """
        offset, done = self.layout.offset(version, plane, page), 0
        while done < len(buffer):
            count = os.preadv(self._direct, [memoryview(buffer)[done:]], offset + done)
            if count == 0:
                raise PagesDamaged(f"{self.path} ends before page {page} of plane {plane}")
            done += count
        index = self.layout.index(plane, page)
        if self._is_known[version, index] and zlib.crc32(buffer) != self._checksums[version, index]:
            raise PagesDamaged(
                f"page {page} of plane {plane} in {self.path} is not what was written (its checksum differs): check "
                "the disk, and go on from the last checkpoint"
            )

    def write(self, version: int, plane: int, page: int, buffer: np.ndarray) -> None:
        """Write a buffer uint8 [page_bytes] that begins at a multiple of ``BLOCK_BYTES``. Raises OSError."""
        offset, done = self.layout.offset(version, plane, page), 0
        index = self.layout.index(plane, page)
        self._is_known[version, index] = False
        while done < len(buffer):
            done += os.pwritev(self._direct, [memoryview(buffer)[done:]], offset + done)
        self._checksums[version, index] = zlib.crc32(buffer)
        self._is_known[version, index] = True

    def commit(self, version: int, step: int) -> None:
        """Record that a version is whole and holds the states after ``step``. Raises OSError."""
        layout = self.layout
        rest = self._checksums[version].tobytes().ljust(layout.record_bytes - HEADER_BYTES, b"\0")
        fields = (MAGIC, step, layout.num_pages, layout.num_copies, layout.page_bytes)
        unchecked = _HEADER.pack(*fields, 0).ljust(HEADER_BYTES, b"\0") + rest
        record, done = _HEADER.pack(*fields, _record_check(unchecked)) + unchecked[_HEADER.size :], 0
        while done < len(record):
            done += os.pwrite(self._file, record[done:], version * layout.record_bytes + done)

    def mapped(self, version: int) -> tuple[mmap.mmap, int]:
        """Return a version as memory, which the operating system writes back, and where in it the version begins.

        Nobody reads or writes pages of the version meanwhile.
        """
        begin = self.layout.version_offset(version)
        start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        return mmap.mmap(self._file, begin - start + self.layout.version_bytes, offset=start), begin - start

    def forget(self, version: int) -> None:
        """Expect no checksums of a version, which was changed as memory."""
        self._is_known[version] = False


def _open_direct(path: Path, offset: int) -> list[int]:
    """Return a handle for direct I/O, or none where the file system has none. Writes zeros at an unused offset."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        os.pwritev(handle, [mmap.mmap(-1, BLOCK_BYTES)], offset)
    except OSError as error:
        os.close(handle)
        if error.errno != errno.EINVAL:
            raise
        return []
    return [handle]


def _remove(handles: list[int], path: Path, process: int) -> None:
    """Remove a file at the end of the process that made it, not of one that was forked from it."""
    if handles and os.getpid() == process:
        with contextlib.suppress(OSError):
            path.unlink()
    for handle in handles:
        os.close(handle)


@contextlib.contextmanager
def _disk_errors(path: Path, layout: FileLayout) -> Iterator[None]:
    """Turn what the system says of a new file into a ValueError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ValueError(f"pages cannot be in {path.parent}: {error.strerror}") from error
        raise ValueError(
            f"pages take {layout.num_bytes / 1e9:.3f} GB of {path.parent}, which has less: free that much, or give "
            "another --state-nvme"
        ) from error
