"""Pages in host memory and on a disk: reads ahead of the update and writes behind it, by threads.

Between steps whoever saves or loads states needs them all as tensors. Then the file's version becomes memory and the
pages of host memory are written into it (*lent*), so that a save needs no host memory that the system cannot take back.
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
    """The states of a table, of which some pages are in a file. They are lent when it is made.

    Attributes:
        table: what lies where.
        host: pages that stay in host memory, and the buffers of the link.
        on_disk: the other pages.
        file: where they are.
        failure: why the disk takes no more pages; then they stay in host memory.
        say_failure: called once with it as text, from the thread that takes the step.
    """

    def __init__(self, table: PageTable, on_disk: Collection[int], file: PageFile, pinned: bool) -> None:
        self.table, self.on_disk, self.file = table, frozenset(on_disk), file
        self.say_failure: Callable[[str], None] = print
        self.host = PageMemory(table, pinned, self.on_disk)
        self.failure: OSError | None = None
        self._num_planes = file.layout.num_planes
        slot_bytes = self._num_planes * table.page_bytes
        memory = torch.zeros(NUM_SLOTS * slot_bytes + BLOCK_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % BLOCK_BYTES
        self._slots = memory[start : start + NUM_SLOTS * slot_bytes].view(NUM_SLOTS, self._num_planes, table.page_bytes)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "pages")
        self._reads: dict[int, tuple[int, Future[None]]] = {}  # by page: slot
        self._writes: dict[int, Future[None]] = {}  # by page, of the last step
        self._in_slot: dict[int, Future[None]] = {}  # by slot: its last write
        self._kept: dict[int, torch.Tensor] = {}  # pages [planes, page_bytes] that could not be written
        self._version, self._step, self._is_stepping = 0, 0, False
        self._lent: tuple[mmap.mmap, int] | None = None
        self._is_changed = False
        self.lend(changed=True)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The buffers [n] of gradients."""
        return self.host.gradients

    @property
    def values(self) -> list[torch.Tensor]:
        """The buffers [n] of results."""
        return self.host.values

    def of_tensor(self, plane: int, number: int, shape: torch.Size) -> torch.Tensor:
        """Return a plane's part of a tensor in its shape, while states are lent."""
        assert self._lent is not None
        memory, start = self._lent
        offset = start + self.file.layout.index(plane, 0) * self.table.page_bytes
        offset += self.table.starts[number] * FLOAT_BYTES
        count = self.table.tensors[number].num_elements
        return torch.frombuffer(memory, dtype=torch.float32, count=count, offset=offset).view(shape)

    def lend(self, changed: bool) -> bool:
        """Lend the states until the next step; ``changed``: they may be written to. Returns whether they were not lent.

        Raises OSError or PagesDamaged where the disk fails.
        """
        self._is_changed |= changed
        if self._lent is not None:
            return False
        self._finish(reads=True)
        if self._step and self.failure is None:
            self._each_host_page(self.file.write)
        self._lent = self.file.mapped(self._version) if self.failure is None else self._in_memory()
        return True

    def begin_step(self) -> None:
        """Take lent states back and record what the last step has written. Raises OSError or PagesDamaged."""
        self._finish(reads=self._is_changed)
        if self._lent is not None and self._is_changed:
            self._lent[0].flush()
            self.file.forget(self._version)
            self._each_host_page(self.file.read)
            self._reads.clear()
        self._lent, self._is_changed, self._is_stepping = None, False, True

    def end_step(self, ahead: Collection[Move]) -> None:
        """Make the pages written in this step the current ones, and start the reads ahead of the next one."""
        self._version, self._step, self._is_stepping = 1 - self._version, self._step + 1, False
        for move in ahead:
            self.move(move)
        self._report_failure()

    def move(self, move: Move) -> None:
        """Start a read or a write. A page that was read ahead is not read again."""
        if move.kind is Kind.WRITE:
            done = self._threads.submit(self._write, move.page, move.buffer, 1 - self._version)
            self._writes[move.page] = self._in_slot[move.buffer] = done
        elif move.page not in self._reads:
            waits = [self._in_slot.get(move.buffer), self._writes.get(move.page) if not self._is_stepping else None]
            done = self._threads.submit(self._read, move.page, move.buffer, self._version, waits)
            self._reads[move.page] = move.buffer, done

    def of_page(self, number: int) -> list[torch.Tensor]:
        """Return the moments and the copy, if any, [elements in use] of a page to update; waits for its read."""
        if number not in self.on_disk:
            return self.host.of_page(number)
        slot, done = self._reads.pop(number)
        done.result()
        page = self.table.pages[number]
        return [self._slots[slot, plane].view(torch.float32)[: page.num_elements] for plane in self._planes_of(number)]

    def _planes_of(self, number: int) -> range:
        return range(COPIES + self.table.pages[number].has_copy)

    def _bytes_of(self, slot: int, plane: int) -> np.ndarray:
        """Return a slot's page of a plane, uint8 [page_bytes]."""
        return self._slots[slot, plane].numpy()

    def _read(self, page: int, slot: int, version: int, waits: list[Future[None] | None]) -> None:
        """Fill a slot, after the writes of what it held and of the page."""
        for one in waits:
            if one is not None:
                one.result()
        if page in self._kept:
            self._slots[slot].copy_(self._kept[page])
            return
        for plane in self._planes_of(page):
            self.file.read(version, plane, page, self._bytes_of(slot, plane))

    def _write(self, page: int, slot: int, version: int) -> None:
        """Write a slot, or keep its page in host memory where the disk fails."""
        try:
            if self.failure is not None:
                raise self.failure
            for plane in self._planes_of(page):
                self.file.write(version, plane, page, self._bytes_of(slot, plane))
        except OSError as error:
            self.failure = error
            self._kept[page] = self._slots[slot].clone()
        else:
            self._kept.pop(page, None)

    def _finish(self, reads: bool) -> None:
        """Wait for all writes, record the version that they have written, and wait for reads too where asked to."""
        for one in [*self._writes.values(), *(done for _, done in self._reads.values() if reads)]:
            one.result()
        if not self._writes:
            return
        self._writes.clear()
        self._in_slot.clear()
        try:
            if self.failure is None:
                self.file.commit(self._version, self._step)
        except OSError as error:
            self.failure = error
        self._report_failure()

    def _report_failure(self) -> None:
        """Say once why the disk has failed, if it has."""
        if self.failure is not None:
            say, self.say_failure = self.say_failure, _say_nothing
            say(f"writing pages to {self.file.path} failed: {self.failure.strerror}; they stay in host memory")

    def _each_host_page(self, move: Callable[[int, int, int, np.ndarray], None]) -> None:
        """Write to the file, or read from it, the pages that stay in host memory."""
        buffer = self._slots.new_empty(self.table.page_bytes + BLOCK_BYTES)
        aligned = buffer[-buffer.data_ptr() % BLOCK_BYTES :][: self.table.page_bytes]
        for number in self.host.places:
            for plane in self._planes_of(number):
                page = self.host.whole_page(plane, number).view(torch.uint8)
                aligned.copy_(page)
                move(self._version, plane, number, aligned.numpy())
                page.copy_(aligned)

    def _in_memory(self) -> tuple[mmap.mmap, int]:
        """Return all states in memory of their own, because the disk takes no more pages."""
        memory = mmap.mmap(-1, self.file.layout.version_bytes)
        whole = torch.frombuffer(memory, dtype=torch.uint8).view(-1, self.table.page_bytes)
        for number in range(len(self.table.pages)):
            for plane in self._planes_of(number):
                target = whole[self.file.layout.index(plane, number)]
                if number in self._kept:
                    target.copy_(self._kept[number][plane])
                elif number in self.on_disk:
                    # The mapping begins at a page of memory, and a page of states is a multiple of it.
                    self.file.read(self._version, plane, number, target.numpy())
                else:
                    target.copy_(self.host.whole_page(plane, number).view(torch.uint8))
        return memory, 0


def _say_nothing(_: str) -> None:
    """Have said it already."""
