"""File of pages: round trip or an error that names the page, and the recorded of two versions is complete."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.plan.states.tiers import BLOCK_BYTES, FileLayout
from bytescale_ext.states import page_file
from bytescale_ext.states.page_file import PageFile, PagesDamaged, is_in_use, page_file_path, read_record

LAYOUT = FileLayout(num_pages=5, num_copies=3, page_bytes=2 * BLOCK_BYTES)
PLACES = [(plane, page) for plane, count in enumerate((5, 5, 3)) for page in range(count)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return page_file_path(tmp_path, 3, 0)


def buffer() -> np.ndarray:
    """Return a page of memory for direct I/O, uint8 [page_bytes]."""
    return np.frombuffer(mmap.mmap(-1, LAYOUT.page_bytes), np.uint8)


def content(step: int, plane: int, page: int) -> np.ndarray:
    """Return the content of a page after a step, uint8 [page_bytes]."""
    return np.random.default_rng((step, plane, page)).integers(0, 256, LAYOUT.page_bytes, np.uint8)


def write_step(file: PageFile, step: int) -> None:
    """Write every page of a step and record the step, like a run."""
    page_bytes = buffer()
    for plane, page in PLACES:
        page_bytes[:] = content(step, plane, page)
        file.write(step % 2, plane, page, page_bytes)
    file.commit(step % 2, step)


@pytest.mark.parametrize("has_direct", [True, False])
def test_pages_are_read_as_they_were_written(path: Path, has_direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_direct:
        monkeypatch.setattr(page_file, "_open_direct", lambda path, offset: [])
    file = PageFile(path, LAYOUT)
    assert path.stat().st_size == LAYOUT.num_bytes
    assert path.stat().st_blocks * 512 >= LAYOUT.num_bytes  # the space is reserved
    assert has_direct or not file.is_direct
    write_step(file, 1)
    write_step(file, 2)
    found = buffer()
    for step, (plane, page) in itertools.product((1, 2), PLACES):
        file.read(step % 2, plane, page, found)
        assert np.array_equal(found, content(step, plane, page))


def test_a_file_system_without_direct_io(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems refuse to open a file for direct I/O, others refuse the first write."""
    opened = os.open
    monkeypatch.setattr(os, "open", lambda name, flags, *rest: opened(name, flags & ~os.O_DIRECT, *rest))

    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "pwritev", refuse)
    assert not PageFile(path, LAYOUT).is_direct


def test_a_damaged_page_is_named(path: Path) -> None:
    file = PageFile(path, LAYOUT)
    write_step(file, 1)
    offset = LAYOUT.offset(1, 1, 4) + 5000
    with path.open("r+b") as other:
        other.seek(offset)
        byte = other.read(1)[0]
        other.seek(offset)
        other.write(bytes([byte ^ 1]))
    for plane, page in PLACES:
        if (plane, page) != (1, 4):
            file.read(1, plane, page, buffer())
    with pytest.raises(
        PagesDamaged, match=r"^page 4 of plane 1 in .*/rank-00003-part-0\.pages differs from the page written"
    ):
        file.read(1, 1, 4, buffer())
    os.truncate(path, LAYOUT.offset(1, 2, 0))
    with pytest.raises(PagesDamaged, match="ends before page 0 of plane 2"):
        file.read(1, 2, 0, buffer())


def test_the_newest_whole_record_counts(path: Path) -> None:
    file = PageFile(path, LAYOUT)
    first = read_record(path)
    assert first is not None
    assert (first.step, first.layout) == (0, LAYOUT)
    for step in (1, 2, 3):
        write_step(file, step)
        record = read_record(path)
        assert record is not None
        assert (record.step, record.version) == (step, step % 2)
        sums = [zlib.crc32(content(step, plane, page)) for plane, page in PLACES]
        assert record.checksums.tolist() == sums
    with path.open("r+b") as torn:  # a crash in the middle of a record
        torn.seek(LAYOUT.record_bytes + 70)
        torn.write(b"torn")
    record = read_record(path)
    assert record is not None
    assert record.step == 2


def test_a_file_in_use_is_another_runs(path: Path) -> None:
    file = PageFile(path, LAYOUT)
    assert is_in_use(path)
    with pytest.raises(ValueError, match="is in use by another run"):
        PageFile(path, LAYOUT)
    assert path.exists()
    file.close()
    assert not path.exists()


def test_what_a_dead_run_has_left_is_replaced(path: Path) -> None:
    file = PageFile(path, LAYOUT)
    write_step(file, 1)
    left = path.read_bytes()
    file.close()
    path.write_bytes(left)
    assert not is_in_use(path)
    file = PageFile(path, replace(LAYOUT, num_pages=6))
    assert file.layout.num_pages == 6
    assert path.stat().st_size > len(left)


@pytest.mark.parametrize("text", [b"x" * 200, b"notes"])
def test_a_foreign_file_stays(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    with pytest.raises(ValueError, match="is not a page file: remove it or give another folder"):
        PageFile(path, LAYOUT)
    assert path.read_bytes() == text


def write_for_ever(path: Path) -> None:
    file = PageFile(path, LAYOUT)
    for step in itertools.count(1):
        write_step(file, step)


@pytest.mark.ranks
def test_a_killed_process_leaves_a_whole_version(path: Path) -> None:
    """After kills at 20 random moments, every page of the recorded step is intact."""
    draw = random.Random(17)
    steps = []
    for _ in range(20):
        path.unlink(missing_ok=True)
        process = os.fork()
        if process == 0:
            try:
                write_for_ever(path)
            finally:
                os._exit(1)
        end = time.monotonic() + 60
        while time.monotonic() < end and not (path.exists() and (record := read_record(path)) and record.step > 0):
            time.sleep(0.001)
        time.sleep(draw.random() * 0.02)
        os.kill(process, signal.SIGKILL)
        assert os.waitpid(process, 0)[1] == signal.SIGKILL
        steps.append(check_whole(path))
    assert all(steps)


def check_whole(path: Path) -> int:
    """Check every page of the recorded step; return the step."""
    record = read_record(path)
    assert record is not None
    with path.open("rb") as file:
        for plane, page in PLACES:
            file.seek(LAYOUT.offset(record.version, plane, page))
            assert file.read(LAYOUT.page_bytes) == content(record.step, plane, page).tobytes(), (
                record.step,
                plane,
                page,
            )
    return record.step
