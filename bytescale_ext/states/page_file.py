"""File of pages on a disk, with direct I/O, checksums, and two versions, at least one of them complete at any time.

A file belongs to one process, which holds a lock on it and removes it when it ends. The file is scratch space: a run
resumes from Megatron's checkpoint, because the file lacks the pages in host memory.
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
    """A page read from disk differs from the page written. The run cannot continue."""


@dataclass(frozen=True, slots=True)
class Record:
    """Record of the newest complete version of a file.

    Attributes:
        step: step of the optimizer.
        version: number of the version.
        layout: layout of the file.
        checksums: checksum of each page of all planes, uint32 [pages]; 0 for pages that were never written.
    """

    step: int
    version: int
    layout: FileLayout
    checksums: np.ndarray


def page_file_path(folder: Path, rank: int, part: int) -> Path:
    """Return the path of the page file of one optimizer part of a rank."""
    return folder / f"rank-{rank:05}-part-{part}.pages"


def read_record(path: Path) -> Record | None:
    """Return the newest complete record of a file, or None without one.

    Raises ValueError if the file is not a page file, and OSError.
    """
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if not head.strip(b"\0"):
            return None  # its process ended before the first record
        if len(head) < _HEADER.size or not head.startswith(MAGIC):
            raise ValueError(f"{path} is not a page file: remove it or give another folder")
        _, _, pages, copies, page_bytes, _ = _HEADER.unpack(head)
        layout = FileLayout(pages, copies, page_bytes)
        if not 0 < NUM_VERSIONS * layout.record_bytes <= os.fstat(file.fileno()).st_size:
            raise ValueError(f"{path} is cut short or damaged: remove it or give another folder")
        file.seek(0)
        records = [_parse_record(file.read(layout.record_bytes), version) for version in range(NUM_VERSIONS)]
    return max((record for record in records if record is not None), key=lambda record: record.step, default=None)


def _parse_record(content: bytes, version: int) -> Record | None:
    """Return a record, or None if it is incomplete or was never written."""
    if len(content) < HEADER_BYTES or not content.startswith(MAGIC):
        return None
    _, step, pages, copies, page_bytes, checksum = _HEADER.unpack_from(content)
    if _record_checksum(content) != checksum:
        return None
    layout = FileLayout(pages, copies, page_bytes)
    checksums = np.frombuffer(content, np.uint32, layout.version_pages, HEADER_BYTES)
    return Record(step, version, layout, checksums)


def _record_checksum(content: bytes) -> int:
    """Return the checksum of a record, without the checksum field itself."""
    return zlib.crc32(content[HEADER_BYTES:], zlib.crc32(content[: _HEADER.size - CHECKSUM_BYTES]))


def is_in_use(path: Path) -> bool:
    """Return whether a running process has locked the file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def check_replaceable(path: Path) -> None:
    """Raise ValueError unless a file is a page file that no running process uses."""
    try:
        read_record(path)
        in_use = is_in_use(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if in_use:
        raise ValueError(f"{path} is in use by another run: give each run its own folder")


class PageFile:
    """Open page file of one process.

    Attributes:
        path: path of the file.
        layout: offsets of pages in the file.
        is_direct: whether reads and writes bypass the page cache of the operating system.
    """

    def __init__(self, path: Path, layout: FileLayout) -> None:
        """Create the file and reserve its space. A file that a dead process has left is replaced.

        Raises ValueError if another process uses the file, it is not a page file, or the disk has too little space.
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
        """Read a page into a buffer, uint8 [page_bytes], whose address is a multiple of ``BLOCK_BYTES``.

        Raises PagesDamaged if the page differs from the page written, OSError if the disk fails.
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
                f"page {page} of plane {plane} in {self.path} differs from the page written (by its checksum): check "
                "the disk, and resume from the last checkpoint"
            )

    def write(self, version: int, plane: int, page: int, buffer: np.ndarray) -> None:
        """Write a page from a buffer, uint8 [page_bytes], whose address is a multiple of ``BLOCK_BYTES``.

        Raises OSError if the disk fails.
        """
        offset, done = self.layout.offset(version, plane, page), 0
        index = self.layout.index(plane, page)
        self._is_known[version, index] = False
        while done < len(buffer):
            done += os.pwritev(self._direct, [memoryview(buffer)[done:]], offset + done)
        self._checksums[version, index] = zlib.crc32(buffer)
        self._is_known[version, index] = True

    def commit(self, version: int, step: int) -> None:
        """Record that a version is complete and holds the states after ``step``. Raises OSError if the disk fails."""
        layout = self.layout
        rest = self._checksums[version].tobytes().ljust(layout.record_bytes - HEADER_BYTES, b"\0")
        fields = (MAGIC, step, layout.num_pages, layout.num_copies, layout.page_bytes)
        unchecked = _HEADER.pack(*fields, 0).ljust(HEADER_BYTES, b"\0") + rest
        record, done = _HEADER.pack(*fields, _record_checksum(unchecked)) + unchecked[_HEADER.size :], 0
        while done < len(record):
            done += os.pwrite(self._file, record[done:], version * layout.record_bytes + done)

    def mapped(self, version: int) -> tuple[mmap.mmap, int]:
        """Return (memory map, offset of the version in the map).

        The operating system writes changes back. While the map is in use, ``read`` and ``write`` must not touch the
        version.
        """
        offset = self.layout.version_offset(version)
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        return mmap.mmap(self._file, offset - start + self.layout.version_bytes, offset=start), offset - start

    def forget_checksums(self, version: int) -> None:
        """Stop checking the pages of a version, because they were changed through a memory map."""
        self._is_known[version] = False


def _open_direct(path: Path, offset: int) -> list[int]:
    """Return [handle for direct I/O], or [] if the file system does not support it. Writes zeros at ``offset``."""
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
    """Close the handles, and remove the file if this is the process that created it and not a fork of it."""
    if handles and os.getpid() == process:
        with contextlib.suppress(OSError):
            path.unlink()
    for handle in handles:
        os.close(handle)


@contextlib.contextmanager
def _disk_errors(path: Path, layout: FileLayout) -> Iterator[None]:
    """Turn an OSError about a new file into a ValueError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ValueError(f"pages cannot be stored in {path.parent}: {error.strerror}") from error
        raise ValueError(
            f"pages need {layout.num_bytes / 1e9:.3f} GB in {path.parent}, which has less: free space, or give another "
            "--state-nvme"
        ) from error
