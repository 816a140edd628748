"""Optimizer states split between host memory and a disk: threads read pages before their update and write them after.

Code that saves or loads states needs all of them as tensors. The states are then *lent*: the pages in host memory are
written to the file, and the current version of the file is mapped into memory. So saving needs no additional memory
that the system cannot reclaim.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
import torch

from bytescale_ext.plan.states.moves import Kind, Move
from bytescale_ext.plan.states.pages import FLOAT_BYTES, PageTable
from bytescale_ext.plan.states.tiers import BLOCK_BYTES, NUM_SLOTS
from bytescale_ext.states.page_file import PageFile
from bytescale_ext.states.pages import COPIES, PageMemory

NUM_THREADS: Final = NUM_SLOTS


class TieredMemory:
    """Optimizer states of a page table, split between host memory and a file. Initially the states are lent.

    Attributes:
        table: contents of each page.
        host: pages in host memory, and the buffers of the link.
        on_disk: numbers of the pages in the file.
        file: file of these pages.
        failure: first error of a write to the disk. After an error, pages that are written stay in host memory.
        report_failure: function that is called once with a message about the failure, by the thread of the step.
    """

    def __init__(self, table: PageTable, on_disk: Collection[int], file: PageFile, pinned: bool) -> None:
        self.table, self.on_disk, self.file = table, frozenset(on_disk), file
        self.report_failure: Callable[[str], None] = print
        self.host = PageMemory(table, pinned, self.on_disk)
        self.failure: OSError | None = None
        self._is_reported = False
        self._num_planes = file.layout.num_planes
        slot_bytes = self._num_planes * table.page_bytes
        memory = torch.zeros(NUM_SLOTS * slot_bytes + BLOCK_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % BLOCK_BYTES
        self._slots = memory[start : start + NUM_SLOTS * slot_bytes].view(NUM_SLOTS, self._num_planes, table.page_bytes)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "pages")
        self._reads: dict[int, tuple[int, Future[None]]] = {}  # (slot, read) by page
        self._writes: dict[int, Future[None]] = {}  # writes of the last step, by page
        self._slot_writes: dict[int, Future[None]] = {}  # the last write of each slot
        self._kept: dict[int, torch.Tensor] = {}  # pages [planes, page_bytes] that could not be written
        self._version, self._step, self._is_stepping = 0, 0, False
        self._lent: tuple[mmap.mmap, int] | None = None
        self._is_changed = False
        self.lend(changed=True)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Buffers [n] of gradients."""
        return self.host.gradients

    @property
    def values(self) -> list[torch.Tensor]:
        """Buffers [n] of results."""
        return self.host.values

    def tensor_view(self, plane: int, number: int, shape: torch.Size) -> torch.Tensor:
        """Return the part of a plane that belongs to a tensor, in ``shape``. Requires that states are lent."""
        assert self._lent is not None
        memory, start = self._lent
        offset = start + self.file.layout.index(plane, 0) * self.table.page_bytes
        offset += self.table.starts[number] * FLOAT_BYTES
        count = self.table.tensors[number].num_elements
        return torch.frombuffer(memory, dtype=torch.float32, count=count, offset=offset).view(shape)

    def lend(self, changed: bool) -> bool:
        """Lend the states until the next step, and return whether this call changed anything.

        ``changed`` says that the caller may write to the states. Raises OSError or PagesDamaged if the disk fails.
        """
        self._is_changed |= changed
        if self._lent is not None:
            return False
        self._finish(reads=True)
        if self._step and self.failure is None:
            self._each_host_page(self.file.write)
        self._lent = self.file.mapped(self._version) if self.failure is None else self._copy_all()
        return True

    def begin_step(self) -> None:
        """End the lending, and record the version that the last step has written.

        Raises OSError or PagesDamaged if the disk fails.
        """
        self._finish(reads=self._is_changed)
        if self._lent is not None and self._is_changed:
            self._lent[0].flush()
            self.file.forget_checksums(self._version)
            self._each_host_page(self.file.read)
            self._reads.clear()
        self._lent, self._is_changed, self._is_stepping = None, False, True

    def end_step(self, ahead: Collection[Move]) -> None:
        """Make the version written in this step the current version, and start the moves ``ahead`` of the next step."""
        self._version, self._step, self._is_stepping = 1 - self._version, self._step + 1, False
        for move in ahead:
            self.move(move)
        self._report_once()

    def move(self, move: Move) -> None:
        """Start a read or a write. A page that was read ahead is not read again."""
        if move.kind is Kind.WRITE:
            write = self._threads.submit(self._write, move.page, move.buffer, 1 - self._version)
            self._writes[move.page] = self._slot_writes[move.buffer] = write
        elif move.page not in self._reads:
            page_write = None if self._is_stepping else self._writes.get(move.page)
            writes = [self._slot_writes.get(move.buffer), page_write]
            read = self._threads.submit(self._read, move.page, move.buffer, self._version, writes)
            self._reads[move.page] = move.buffer, read

    def page_views(self, number: int) -> list[torch.Tensor]:
        """Return the moments of a page and its float32 copy, if it has one, each [elements in use].

        Waits for the read of a page on the disk, and raises OSError or PagesDamaged if it failed.
        """
        if number not in self.on_disk:
            return self.host.page_views(number)
        slot, read = self._reads.pop(number)
        read.result()
        page = self.table.pages[number]
        return [self._slots[slot, plane].view(torch.float32)[: page.num_elements] for plane in self._planes_of(number)]

    def _planes_of(self, number: int) -> range:
        return range(COPIES + self.table.pages[number].has_copy)

    def _slot_bytes(self, slot: int, plane: int) -> np.ndarray:
        """Return the page of a plane in a slot, uint8 [page_bytes]."""
        return self._slots[slot, plane].numpy()

    def _read(self, page: int, slot: int, version: int, writes: list[Future[None] | None]) -> None:
        """Read a page into a slot, after the earlier writes of the slot and of the page."""
        for write in writes:
            if write is not None:
                write.result()
        if page in self._kept:
            self._slots[slot].copy_(self._kept[page])
            return
        for plane in self._planes_of(page):
            self.file.read(version, plane, page, self._slot_bytes(slot, plane))

    def _write(self, page: int, slot: int, version: int) -> None:
        """Write the page in a slot, or keep the page in host memory if the disk fails."""
        try:
            if self.failure is not None:
                raise self.failure
            for plane in self._planes_of(page):
                self.file.write(version, plane, page, self._slot_bytes(slot, plane))
        except OSError as error:
            self.failure = error
            self._kept[page] = self._slots[slot].clone()
        else:
            self._kept.pop(page, None)

    def _finish(self, reads: bool) -> None:
        """Wait for all writes and, if ``reads`` is set, for all reads; then record the written version."""
        for transfer in [*self._writes.values(), *(read for _, read in self._reads.values() if reads)]:
            transfer.result()
        if not self._writes:
            return
        self._writes.clear()
        self._slot_writes.clear()
        try:
            if self.failure is None:
                self.file.commit(self._version, self._step)
        except OSError as error:
            self.failure = error
        self._report_once()

    def _report_once(self) -> None:
        """Report a failure of the disk, if there is one that was not reported."""
        if self.failure is not None and not self._is_reported:
            self._is_reported = True
            self.report_failure(
                f"writing pages to {self.file.path} failed: {self.failure.strerror}; they stay in host memory"
            )

    def _each_host_page(self, move: Callable[[int, int, int, np.ndarray], None]) -> None:
        """Write the pages in host memory to the file, or read them from it; ``move``: the file's method."""
        buffer = self._slots.new_empty(self.table.page_bytes + BLOCK_BYTES)
        aligned = buffer[-buffer.data_ptr() % BLOCK_BYTES :][: self.table.page_bytes]
        for number in self.host.places:
            for plane in self._planes_of(number):
                page = self.host.whole_page(plane, number).view(torch.uint8)
                aligned.copy_(page)
                move(self._version, plane, number, aligned.numpy())
                page.copy_(aligned)

    def _copy_all(self) -> tuple[mmap.mmap, int]:
        """Return (copy of all states in memory, 0), as ``PageFile.mapped`` does for a disk that works."""
        memory = mmap.mmap(-1, self.file.layout.version_bytes)
        whole = torch.frombuffer(memory, dtype=torch.uint8).view(-1, self.table.page_bytes)
        for number in range(len(self.table.pages)):
            for plane in self._planes_of(number):
                target = whole[self.file.layout.index(plane, number)]
                if number in self._kept:
                    target.copy_(self._kept[number][plane])
                elif number in self.on_disk:
                    # Direct I/O needs aligned buffers: the map starts at a page of memory, and pages of states are
                    # multiples of it.
                    self.file.read(self._version, plane, number, target.numpy())
                else:
                    target.copy_(self.host.whole_page(plane, number).view(torch.uint8))
        return memory, 0
