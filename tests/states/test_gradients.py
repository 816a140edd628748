"""Gradient sums in host memory are bitwise equal to sums on a device, and are reduced in chunks."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from bytescale_ext.plan.states.pages import NUM_GRADIENT_SLOTS
from bytescale_ext.states import gradients
from bytescale_ext.states.collectives import ChunkedCollectives
from bytescale_ext.states.gradients import GradientSums
from tests.harness import run_ranks

SLOT_BYTES = 64
SHARD = 13
CHUNK_SIZES = (1, 5, 1000)  # 5 elements on three ranks: one element each
SHAPES = ((3, 5), (1,), (NUM_GRADIENT_SLOTS * 3, 40), (7,))  # the third tensor needs more parts than there are slots


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_those_of_a_device(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sums = GradientSums(SLOT_BYTES, on_cuda=False)
    found, expected = ([torch.zeros(shape) for shape in SHAPES] for _ in range(2))
    for _ in range(5):
        for total, plain in zip(found, expected, strict=True):
            gradient = torch.randn(total.shape).to(dtype)
            plain.add_(gradient)
            sums.add(total, gradient)
            gradient.fill_(torch.nan)  # its memory is free for computation as soon as it is copied
    sums.finish()
    assert all(map(torch.equal, found, expected))


def test_slots_are_not_overwritten_before_they_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Additions are delayed until the second gradient needs the slots of the first."""
    may_add, add = threading.Event(), gradients._add
    monkeypatch.setattr(gradients, "_add", lambda *given: may_add.wait(60) and add(*given))
    sums = GradientSums(SLOT_BYTES, on_cuda=False)
    total = torch.zeros(NUM_GRADIENT_SLOTS * SLOT_BYTES // 4)
    sums.add(total, torch.full_like(total, 1.0))
    assert not total.any()
    second = threading.Thread(target=sums.add, args=(total, torch.full_like(total, 2.0)))
    second.start()
    may_add.set()
    second.join(60)
    sums.finish()
    assert torch.equal(total, torch.full_like(total, 3.0))


def test_a_failed_addition_is_raised() -> None:
    sums = GradientSums(SLOT_BYTES, on_cuda=False)
    sums._additions[3] = sums._thread.submit(gradients._add, torch.zeros(2), torch.zeros(3), None)
    with pytest.raises(RuntimeError, match="size"):
        sums.finish()


def compare(rank: int, world: int) -> list[tuple[str, bool]]:
    """Return whether each collective returned the correct elements."""
    group = dist.group.WORLD
    assert group is not None
    whole = torch.stack([torch.arange(world * SHARD, dtype=torch.float64) * 10 + one for one in range(world)])
    mine = slice(rank * SHARD, (rank + 1) * SHARD)
    found = []
    for size in CHUNK_SIZES:
        chunks = ChunkedCollectives(group, torch.device("cpu"), size)
        total = whole[rank].clone()
        chunks.reduce(total)
        found.append((f"reduce {size}", torch.equal(total, whole.sum(0))))
        shard = whole[rank].clone()
        chunks.reduce_scatter(shard)
        found.append((f"reduce_scatter {size}", torch.equal(shard[mine], whole.sum(0)[mine])))
        largest = whole[rank].clone()
        chunks.reduce(largest, dist.ReduceOp.MAX)
        found.append((f"other operations {size}", torch.equal(largest, whole[-1])))
        gathered = torch.full_like(whole[0], torch.nan)
        gathered[mine] = whole[0][mine]
        chunks.gather(gathered)
        found.append((f"gather {size}", torch.equal(gathered, whole[0])))
    return found


@pytest.mark.ranks
def test_chunks_are_parts_of_one_collective() -> None:
    for found in run_ranks(compare, 3):
        assert [name for name, is_right in found if not is_right] == []
        assert len(found) == 4 * len(CHUNK_SIZES)


def alone(rank: int, world: int) -> bool:
    """Return whether a single rank leaves its tensor unchanged, without a device."""
    group = dist.group.WORLD
    assert group is not None
    chunks, whole = ChunkedCollectives(group, torch.device("meta"), 2), torch.arange(6.0)
    chunks.reduce(whole)
    chunks.reduce_scatter(whole)
    chunks.gather(whole)
    return torch.equal(whole, torch.arange(6.0))
