from __future__ import annotations

import mmap
import random
from typing import Any

import pytest
import torch

from bytescale_ext.activation.arena import ALIGNMENT, MOST_VIEWS, SMALLEST_ARENA, ArenaPart, HostArena, allocate_arena
from bytescale_ext.states.node_memory import host_block


def arena_of(num_bytes: int) -> HostArena:
    return HostArena(torch.empty(num_bytes, dtype=torch.uint8))


def test_parts_never_overlap_and_join_again() -> None:
    dice = random.Random(0)
    arena = arena_of(64 * ALIGNMENT)
    held: list[tuple[ArenaPart, torch.Tensor, int]] = []
    refused = 0
    for step in range(2000):
        if held and dice.random() < 0.5:
            block, view, mark = held.pop(dice.randrange(len(held)))
            assert (view == mark).all()  # no other tensor has written there
            arena.give_back(block)
        else:
            size = dice.randint(1, 9 * ALIGNMENT)
            taken = arena.take(size)
            if taken is None:
                refused += 1
                free = 64 * ALIGNMENT - sum(b.num_bytes for b, *_ in held)
                assert size > free / (len(held) + 1)  # otherwise some gap would have been large enough
                continue
            view = arena.view(taken, (size,), torch.uint8)
            view.fill_(step % 251)
            held.append((taken, view, step % 251))
        assert arena.used_bytes == sum(block.num_bytes for block, *_ in held) <= arena.peak_bytes <= arena.num_bytes
    assert refused > 50
    for block, *_ in held:
        arena.give_back(block)
    assert arena.used_bytes == 0
    assert arena.take(64 * ALIGNMENT) == ArenaPart(0, 64 * ALIGNMENT)


def test_views_are_kept_up_to_a_bound() -> None:
    arena = arena_of(1 << 20)
    part = arena.take(1 << 20)
    assert part is not None
    assert arena.view(part, (2, 3), torch.float32) is arena.view(part, (2, 3), torch.float32)
    for size in range(1, MOST_VIEWS + 10):
        view = arena.view(part, (size,), torch.uint8)
        assert view.shape == (size,)
        assert view.data_ptr() == arena.memory.data_ptr()
    assert len(arena._views) <= MOST_VIEWS


def test_a_part_is_given_back_once() -> None:
    arena = arena_of(4 * ALIGNMENT)
    block = arena.take(ALIGNMENT)
    assert block is not None
    arena.give_back(block)
    with pytest.raises(AssertionError):
        arena.give_back(block)


def test_memory_that_cannot_be_had_is_halved_with_one_warning() -> None:
    asked: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        if num_bytes > 3 * SMALLEST_ARENA:
            raise RuntimeError("no pinned memory")
        return torch.empty(num_bytes, dtype=torch.uint8)

    with pytest.warns(UserWarning, match="the rest stays on the device") as caught:
        arena = allocate_arena(16 * SMALLEST_ARENA, pinned=True, allocate=allocate)
    assert len(caught) == 1
    assert asked == [16 * SMALLEST_ARENA, 8 * SMALLEST_ARENA, 4 * SMALLEST_ARENA, 2 * SMALLEST_ARENA]
    assert arena.num_bytes == 2 * SMALLEST_ARENA


class Runtime:
    """CUDA's registrations of host memory: an address may be registered once."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        """Return an error if the block overlaps with another."""
        overlaps = any(
            address < start + size and start < address + num_bytes for start, size in self.registered.items()
        )
        if not overlaps:
            self.registered[address] = num_bytes
        return 712 if overlaps else 0

    def cudaHostUnregister(self, address: int) -> int:
        """Forget a block, which must still exist."""
        del self.registered[address]
        return 0


@pytest.mark.slow
def test_freed_memory_is_unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view keeps the registration. The system reuses freed addresses, so the next block can be registered there."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    for _ in range(3):
        arena: Any = allocate_arena(64 << 20, pinned=True)
        assert arena.num_bytes == 64 << 20
        assert not arena.memory.any()
        view = arena.memory[mmap.PAGESIZE :].view(torch.float32)
        del arena
        assert list(runtime.registered.values()) == [64 << 20]
        view.fill_(1.0)
        del view
        assert runtime.registered == {}
    block = host_block(1000, torch.float32, pinned=True)
    assert list(runtime.registered.values()) == [4000]
    del block
    assert runtime.registered == {}
    assert host_block(0, torch.float32, pinned=True).numel() == 0
