"""Measure how many GPUs of a machine share one link to host memory, and its speed for each.

One process copies alone, then one process for each GPU copies at the same time. The slowest process shows how many
processes share its link.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import torch

START_SECONDS = 120.0


@dataclass(frozen=True)
class SharedLink:
    """GB/s to the host and to the device: of one process alone, and of the slowest of ``num_processes`` together."""

    num_processes: int
    alone: tuple[float, float]
    together: tuple[float, float]

    @property
    def gpus_per_link(self) -> int:
        """Number of processes that share a link, by the direction that slows down more; at most all of them."""
        slowdown = max(alone / together for alone, together in zip(self.alone, self.together, strict=True))
        return min(self.num_processes, max(1, round(slowdown)))


def measure_shared_link(num_processes: int, num_bytes: int, repeats: int, on_cuda: bool) -> SharedLink:
    """Measure copies to the host and to the device; each process has its own GPU, or all share the CPU.

    Raises:
        RuntimeError: a process did not finish.
    """
    alone = copy_speeds(1, num_bytes, repeats, on_cuda)
    many = copy_speeds(num_processes, num_bytes, repeats, on_cuda) if num_processes > 1 else alone
    slowest = [min(speeds) for speeds in zip(*many, strict=True)]
    return SharedLink(num_processes, alone[0], (slowest[0], slowest[1]))


def copy_speeds(num_processes: int, num_bytes: int, repeats: int, on_cuda: bool) -> list[tuple[float, float]]:
    """Return GB/s to the host and to the device, of each of ``num_processes`` that copy at the same time."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_processes)
    pipes = [context.Pipe(duplex=False) for _ in range(num_processes)]
    processes = [
        context.Process(target=_copy, args=(rank, num_bytes, repeats, on_cuda, (barrier, sender)))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    try:
        return [_received(receiver) for receiver, _ in pipes]
    finally:
        for process in processes:
            process.join(5.0)
            process.terminate()
            process.join()


def _received(receiver: Connection) -> tuple[float, float]:
    try:
        if receiver.poll(START_SECONDS):
            to_host, to_device = receiver.recv()
            return to_host, to_device
    except EOFError:
        pass
    raise RuntimeError("a process that measures the link to host memory did not finish")


def _copy(rank: int, num_bytes: int, repeats: int, on_cuda: bool, ends: tuple[Barrier, Connection]) -> None:
    """Measure the copies of one process, between two barriers of all processes, and send GB/s in both directions."""
    torch.set_num_threads(1)
    barrier, sender = ends
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_cuda else torch.device("cpu")
    near = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_cuda)
    speeds = []
    for target, source in ((host, near), (near, host)):
        target.copy_(source)
        barrier.wait(START_SECONDS)
        begun = time.perf_counter()
        for _ in range(repeats):
            target.copy_(source, non_blocking=True)
        if on_cuda:
            torch.cuda.synchronize(device)
        speeds.append(repeats * num_bytes / (time.perf_counter() - begun) / 1e9)
        barrier.wait(START_SECONDS)
    sender.send(tuple(speeds))
