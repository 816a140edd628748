"""Blocks that the processes of a node share hold the sum of their gradients, and collectives work on them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bytescale_ext.states.collectives import ChunkedCollectives
from bytescale_ext.states.gradients import GradientSums
from bytescale_ext.states.node_memory import HostBlocks, NodeRanks, SharedBlock
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
SHARD = 13
PASSES = 20


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def add_at_once(rank: int, world: int) -> tuple[torch.Tensor, int, bool]:
    """Add gradients of whole numbers to one sum. Return it, this process's bytes, and whether all zero their parts."""
    blocks, group = HostBlocks(shares=True, on_cuda=False), world_group()
    total = blocks.allocate(1000, torch.float32, group)
    shared = blocks.shared(total)
    assert shared is not None
    assert total in blocks
    sums = GradientSums(64, on_cuda=False)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(PASSES):
        sums.add(total, torch.randint(9, (1000,), generator=generator).float(), shared)
    sums.finish()
    shared.node.barrier()
    found = total.clone()
    shared.node.barrier()
    total[shared.node.own(1000)].zero_()
    shared.node.barrier()
    return found, blocks.num_bytes(total), not total.any()


def test_processes_add_to_one_sum() -> None:
    expected = torch.zeros(1000)
    for rank in range(4):
        generator = torch.Generator().manual_seed(rank)
        for _ in range(PASSES):
            expected += torch.randint(9, (1000,), generator=generator)
    for found, num_bytes, is_zero in run_ranks(add_at_once, 4):
        assert torch.equal(found, expected)
        assert num_bytes == 1000
        assert is_zero


def collect(rank: int, world: int) -> list[str]:
    """Return the collectives with wrong results on two nodes of two ranks and a node of one."""
    nodes = ((0, 1), (2, 3), (4,))
    node = NodeRanks(world_group(), CPU, next(ranks for ranks in nodes if rank in ranks))
    of_nodes = torch.arange(3 * world * SHARD, dtype=torch.float64).view(3, -1)
    total, wrong = of_nodes.sum(0), []
    for size in (1, 7, 1000):
        for name in ("reduce", "reduce_scatter", "gather"):
            block = SharedBlock.create(total.nbytes, node, pinned=False)
            assert block is not None
            whole = block.memory.view(total.dtype)
            mine = slice(rank * SHARD, (rank + 1) * SHARD)
            if node.position == 0:
                whole.copy_(of_nodes[nodes.index(node.ranks)])
            node.barrier()
            if name == "gather":
                whole[mine] = total[mine]
            node.barrier()
            getattr(ChunkedCollectives(world_group(), CPU, size, node), name)(whole)
            node.barrier()
            part = mine if name == "reduce_scatter" else slice(None)
            if not torch.equal(whole[part], total[part]):
                wrong.append(f"{name} of {size}")
            node.barrier()
    return wrong


def test_collectives_of_shared_blocks() -> None:
    assert run_ranks(collect, 5) == [[]] * 5


def find_nodes(rank: int, world: int) -> tuple[int, ...]:
    """Return the ranks of this process's node; the first two ranks are in another container."""
    read = os.readlink
    with mock.patch.object(os, "readlink", lambda path: "pid:[7]" if rank < 2 and "pid" in path else read(path)):
        return NodeRanks.find(world_group(), CPU).ranks


def test_a_node_is_a_container() -> None:
    assert run_ranks(find_nodes, 4) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def be_refused(rank: int, world: int) -> tuple[bool, list[str], int]:
    """Return whether memory is private, the warnings, and the files left open. Rank 1 cannot open the memory."""

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied", "/proc/1/fd/9")

    before = len(list(Path("/proc/self/fd").iterdir()))
    blocks = HostBlocks(shares=True, on_cuda=False)
    with warnings.catch_warnings(record=True) as told, mock.patch.object(os, "open", refuse if rank == 1 else os.open):
        warnings.simplefilter("always")
        first, second = (blocks.allocate(10, torch.float32, world_group()) for _ in range(2))
    is_private = blocks.shared(first) is None and blocks.shared(second) is None
    assert blocks.num_bytes(first) == 40
    notes = [text for one in told if "this node" in (text := str(one.message))]
    return is_private, notes, len(list(Path("/proc/self/fd").iterdir())) - before


def test_memory_that_cannot_be_shared_is_private() -> None:
    note = "the processes of this node cannot share host memory{}: each holds its own copy"
    assert run_ranks(be_refused, 2) == [
        (True, [note.format("")], 0),
        (True, [note.format(" (Permission denied: /proc/1/fd/9)")], 0),
    ]
