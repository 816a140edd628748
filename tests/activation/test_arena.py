from __future__ import annotations

import random
import warnings

import pytest
import torch

from bytescale_ext.activation.arena import ALIGNMENT, SMALLEST_ARENA, Block, HostArena, allocate_arena, register


def arena_of(num_bytes: int) -> HostArena:
    return HostArena(torch.empty(num_bytes, dtype=torch.uint8))


def test_parts_never_overlap_and_join_again() -> None:
    dice = random.Random(0)
    arena = arena_of(64 * ALIGNMENT)
    held: list[tuple[Block, torch.Tensor, int]] = []
    refused = 0
    for step in range(2000):
        if held and dice.random() < 0.5:
            block, view, mark = held.pop(dice.randrange(len(held)))
            assert (view == mark).all()  # nobody else has written there
            arena.give_back(block)
        else:
            size = dice.randint(1, 9 * ALIGNMENT)
            taken = arena.take(size)
            if taken is None:
                refused += 1
                free = 64 * ALIGNMENT - sum(b.num_bytes for b, *_ in held)
                assert size > free / (len(held) + 1)  # some gap would have been large enough otherwise
                continue
            view = arena.view(taken, (size,), torch.uint8)
            view.fill_(step % 251)
            held.append((taken, view, step % 251))
        assert arena.used_bytes == sum(block.num_bytes for block, *_ in held) <= arena.peak_bytes <= arena.num_bytes
    assert refused > 50
    for block, *_ in held:
        arena.give_back(block)
    assert arena.used_bytes == 0
    assert arena.take(64 * ALIGNMENT) == Block(0, 64 * ALIGNMENT)


def test_the_smallest_gap_that_fits_is_taken() -> None:
    arena = arena_of(10 * ALIGNMENT)
    blocks = [arena.take(size * ALIGNMENT) for size in (3, 1, 2, 1, 3)]
    for index in (0, 2, 4):
        block = blocks[index]
        assert block is not None
        arena.give_back(block)
    assert arena.take(2 * ALIGNMENT) == blocks[2]
    assert arena.take(3 * ALIGNMENT) == blocks[0]


def test_a_part_is_given_back_once() -> None:
    arena = arena_of(4 * ALIGNMENT)
    block = arena.take(ALIGNMENT)
    assert block is not None
    arena.give_back(block)
    with pytest.raises(AssertionError):
        arena.give_back(block)


def test_views_have_any_type() -> None:
    arena = arena_of(1024)
    arena.take(1)
    block = arena.take(24)
    assert block is not None
    view = arena.view(block, (2, 3), torch.float32)
    view.copy_(torch.arange(6).view(2, 3))
    assert view.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(AssertionError):
        arena.view(block, (65,), torch.float32)


def test_no_budget_gives_nothing() -> None:
    arena = allocate_arena(0, pinned=False)
    assert arena.num_bytes == 0
    assert arena.take(1) is None


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


def test_no_memory_at_all_is_no_error() -> None:
    def allocate(num_bytes: int) -> torch.Tensor:
        raise RuntimeError("none")

    with pytest.warns(UserWarning, match="continuing with 0 GB"):
        assert allocate_arena(8 * SMALLEST_ARENA, pinned=True, allocate=allocate).num_bytes == 0


def test_enough_memory_is_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert allocate_arena(1 << 16, pinned=False).num_bytes == 1 << 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_refused_registration_leaves_no_error_behind() -> None:
    memory = torch.empty(1 << 20, dtype=torch.uint8)
    register(memory)
    with pytest.raises(RuntimeError, match="cudaHostRegister of 1048576 bytes: error"):
        register(memory)
    assert torch.ones(8, device="cuda").sum().item() == 8
