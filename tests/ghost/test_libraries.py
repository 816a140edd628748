"""The ghost libraries keep the rules of CUDA and NCCL that the trainings rely on."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.ghost.devices import GHOST_GPUS, needs_ghosts
from tests.harness import RanksFailed, ranks_on, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.full, needs_ghosts]


def error_of(function, *args) -> str:
    """Return the text of the RuntimeError of a call, or ""."""
    try:
        function(*args)
    except RuntimeError as error:
        return str(error)
    return ""


def use_one_gpu(rank: int, world: int) -> dict[str, object]:
    x = torch.arange(12.0, device="cuda").view(3, 4)
    memory = torch.empty(1 << 16)
    runtime = torch.cuda.cudart()
    start = memory.data_ptr()

    def register() -> int:
        return int(runtime.cudaHostRegister(start, memory.numel() * 4, 0))

    heads = torch.zeros(1, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
    generator = torch.cuda.get_rng_state()
    drawn = [torch.rand(3, device="cuda").tolist() for _ in range(2)]
    torch.cuda.set_rng_state(generator)
    return {
        "capability": torch.cuda.get_device_capability(),
        "type": x.type(),
        "sums": (x @ x.t()).sum(0).tolist(),
        "out": torch.add(x, 1, out=torch.empty(0, device="cuda")).shape,
        "mixed devices": error_of(torch.add, x, torch.ones(3, 4)),
        "other generator": error_of(lambda: x.normal_(generator=torch.Generator())),
        "not played": error_of(torch.ops.aten._cudnn_attention_forward, *3 * [heads], *3 * [None], 8, 8, True),
        "too large": error_of(lambda: torch.empty(100 << 30, dtype=torch.uint8, device="cuda")),
        "drawn again": drawn[0] != drawn[1] and torch.rand(3, device="cuda").tolist() == drawn[0],
        "pinned": (torch.empty(3, pin_memory=True).is_pinned(), memory.is_pinned()),
        "registered": (register(), register(), memory.is_pinned()),
        "registered again": (int(runtime.cudaHostUnregister(start)), register()),
    }


def test_one_gpu() -> None:
    with ranks_on(GHOST_GPUS):
        (found,) = run_ranks(use_one_gpu, 1)
    assert found["capability"] == (9, 0)
    assert found["type"] == "torch.cuda.FloatTensor"
    assert found["sums"] == [114.0, 378.0, 642.0]
    assert found["out"] == (3, 4)
    assert "Expected all tensors to be on the same device" in found["mixed devices"]
    assert "Expected a 'cuda' device type for generator" in found["other generator"]
    assert "cuDNN error" in found["not played"]
    assert "out of memory" in found["too large"]
    assert found["drawn again"]
    assert found["pinned"] == (True, False)
    already_registered = 712
    assert found["registered"] == (0, already_registered, True)
    assert found["registered again"] == (0, 0)


def communicate(rank: int, world: int) -> list[object]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mine = torch.arange(4.0, device=device) + 10 * rank
    total, halves = mine.clone(), torch.empty(2, device=device)
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    dist.reduce_scatter_tensor(halves, mine)
    gathered, swapped = torch.empty(8, device=device), torch.empty(4, device=device)
    work = dist.all_gather_into_tensor(gathered, mine, async_op=True)
    dist.all_to_all_single(swapped, mine)
    work.wait()
    root = mine.clone()
    dist.broadcast(root, 1)
    received = [torch.empty(2, device=device) for _ in range(2)]
    peer = 1 - rank
    messages = [dist.P2POp(dist.isend, part, peer) for part in mine.chunk(2)]
    messages += [dist.P2POp(dist.irecv, part, peer) for part in received]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the kernel after the collective waits for it
        dist.all_reduce(mine)
        doubled = mine * 2
    side.synchronize()
    half = torch.full((3,), 1 / 3, dtype=torch.bfloat16, device=device)
    dist.all_reduce(half)
    tensors = (total, halves, gathered, swapped, root, torch.cat(received), doubled, half)
    return [tensor.tolist() for tensor in tensors]


def test_collectives_and_messages() -> None:
    with ranks_on(GHOST_GPUS):
        found = run_ranks(communicate, 2)
    for rank, values in enumerate(found):
        total, halves, gathered, swapped, root, received, doubled, half = values
        assert total == [5, 6, 7, 8]
        assert halves == [[10, 12], [14, 16]][rank]
        assert gathered == [0, 1, 2, 3, 10, 11, 12, 13]
        assert swapped == [[0, 1, 10, 11], [2, 3, 12, 13]][rank]
        assert root == [10, 11, 12, 13]
        assert received == [[10, 11, 12, 13], [0, 1, 2, 3]][rank]
        assert doubled == [20, 24, 28, 32]
        assert half == [float(torch.tensor(2 / 3, dtype=torch.bfloat16))] * 3


def reduce_different_sizes(rank: int, world: int) -> None:
    torch.cuda.set_device(rank)
    dist.all_reduce(torch.ones(3 + rank, device="cuda"))


def receive_nothing(rank: int, world: int) -> None:
    os.environ["GHOST_LIMIT"] = "3"
    torch.cuda.set_device(rank)
    if rank == 0:
        dist.recv(torch.empty(3, device="cuda"), 1)


def share_a_gpu(rank: int, world: int) -> str:
    try:
        dist.all_reduce(torch.ones(3, device="cuda:0"))
    except dist.DistBackendError as error:
        return str(error)
    return ""


def test_ranks_that_share_a_gpu_are_refused() -> None:
    with ranks_on(GHOST_GPUS):
        assert all("NCCL error" in text for text in run_ranks(share_a_gpu, 2))


@pytest.mark.parametrize("function", [reduce_different_sizes, receive_nothing])
def test_faults_end_the_process(function) -> None:
    """The message that says why goes to the standard error of the fork server."""
    with ranks_on(GHOST_GPUS), pytest.raises(RanksFailed, match="ended without a report, exit code -6"):
        run_ranks(function, 2)
