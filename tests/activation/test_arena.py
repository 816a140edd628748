from __future__ import annotations

import random

import pytest
import torch

from bytescale_ext.activation.arena import ALIGNMENT, SMALLEST_ARENA, ArenaPart, HostArena, allocate_arena


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
