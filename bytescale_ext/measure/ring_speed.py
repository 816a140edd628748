"""Measures how many bytes per second ranks move: in ring attention, with its own exchange, and in collectives."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from bytescale_ext.measure.speeds import Timer, copy_seconds_per_byte
from bytescale_ext.parallel.p2p import RingComm

MESSAGE_BYTES: Final = 1 << 23
"""Size of one message: 8K tokens of a layer with few key heads, and large enough to saturate a network."""
REPEATS: Final = 8
_NUMBER_BYTES = 4
START_SECONDS: Final = 120.0


def exchanged_bytes_per_second(
    comm: RingComm, device: torch.device, num_bytes: int = MESSAGE_BYTES, peers: tuple[int, int] | None = None
) -> float:
    """Return the rate at which a rank receives while it sends as many bytes, as in a ring: the best of several tries.

    Collective: all ranks of ``comm`` (two or more) call it with equal sizes. ``peers``: to which rank it sends and from
    which it receives; by default its neighbours in a ring of all ranks.
    """
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    following, previous = peers or ((comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
    fastest = float("inf")
    for _ in range(REPEATS):
        begun = time.perf_counter()
        comm.exchange([(sent, following)], [(received, previous)]).wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - begun)
    return num_bytes / fastest


def bytes_per_second_of_nodes(
    comm: RingComm, ranks_per_node: int, device: torch.device, num_bytes: int = MESSAGE_BYTES
) -> tuple[float, float]:
    """Return the rates at which a rank receives inside its node and from another node while all ranks do the same.

    Collective over all processes; ``comm`` holds several whole nodes of two ranks or more. All get the slowest rates.
    """
    first, place = comm.rank - comm.rank % ranks_per_node, comm.rank % ranks_per_node
    inside = first + (place + 1) % ranks_per_node, first + (place - 1) % ranks_per_node
    between = (comm.rank + ranks_per_node) % comm.size, (comm.rank - ranks_per_node) % comm.size
    found = [exchanged_bytes_per_second(comm, device, num_bytes, peers) for peers in (inside, between)]
    slowest = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    return float(slowest[0]), float(slowest[1])


def collective_seconds_per_byte(
    group: dist.ProcessGroup, device: torch.device, num_bytes: int = MESSAGE_BYTES
) -> float:
    """Return the seconds for each byte that a rank receives in collectives: the best of several tries.

    It is the mean of a gather and of a reduction that scatters, of which tensor parallelism has equally many.
    Collective over all processes, each with its own ``group`` of two or more. All get the time of the slowest.
    """
    size = dist.get_world_size(group)
    received_bytes = num_bytes // size * (size - 1)
    return _mean_seconds(group, device, num_bytes // size) / received_bytes


def collective_latency(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds of such a collective with one number of each rank."""
    return _mean_seconds(group, device, _NUMBER_BYTES)


def _mean_seconds(group: dist.ProcessGroup, device: torch.device, own_bytes: int) -> float:
    """Return the mean of a gather and a reduction, so many bytes of each rank: the best tries, of the slowest rank."""
    own = torch.zeros(own_bytes // _NUMBER_BYTES, device=device)
    every = torch.zeros(dist.get_world_size(group) * len(own), device=device)
    fastest = [float("inf")] * 2
    collectives: tuple[Callable[[], object], ...] = (
        lambda: dist.all_gather_into_tensor(every, own, group=group),
        lambda: dist.reduce_scatter_tensor(own, every, group=group),
    )
    for _ in range(REPEATS):
        for number, collective in enumerate(collectives):
            begun = time.perf_counter()
            collective()
            if device.type == "cuda":
                torch.cuda.synchronize()
            fastest[number] = min(fastest[number], time.perf_counter() - begun)
    slowest = torch.tensor(sum(fastest) / 2, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def bytes_per_second_of_two_processes(on_cuda: bool) -> float:
    """Return the rate between two new processes on this machine, each with its own GPU or both on CPU.

    Raises:
        ValueError: the processes did not finish.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bytescale-") as folder:
        results, sender = context.Pipe(duplex=False)
        store = str(Path(folder) / "store")
        processes = [context.Process(target=_rank, args=(rank, store, on_cuda, sender)) for rank in (0, 1)]
        for process in processes:
            process.start()
        sender.close()
        try:
            if not results.poll(START_SECONDS):
                raise EOFError
            return float(results.recv())
        except EOFError:
            raise ValueError(
                "two processes on this machine could not exchange data; give --ring-bytes-per-second"
            ) from None
        finally:
            for process in processes:
                process.join(5.0)
                process.terminate()
                process.join()


def host_copy_bytes_per_second() -> float:
    """Return the rate between the GPU and page-locked host memory, over the bus that a network card also uses."""
    host = torch.empty(MESSAGE_BYTES * 8, dtype=torch.uint8, pin_memory=True)
    return 1.0 / copy_seconds_per_byte(host, torch.device("cuda"), Timer(synchronize=torch.cuda.synchronize))


def _rank(rank: int, store: str, on_cuda: bool, sender: Connection) -> None:
    """Run one of the two processes; the first sends the result."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=START_SECONDS)
    backend = "nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    comm = RingComm(None, rank, 2)
    comm.warm_up(device)
    rate = exchanged_bytes_per_second(comm, device)
    if rank == 0:
        sender.send(rate)
    dist.barrier()
    dist.destroy_process_group()
