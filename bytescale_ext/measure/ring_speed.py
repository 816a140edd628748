"""Measured transfer rates between ranks: the exchange of ring attention, and tensor-parallel collectives."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from bytescale_ext.measure.speeds import Timer, copy_seconds_per_byte, run_seconds
from bytescale_ext.parallel.p2p import RingComm

MESSAGE_BYTES: Final = 1 << 23
"""Size of one message: keys of 8K tokens in a layer with few key heads, large enough to saturate a network."""
REPEATS: Final = 8
START_SECONDS: Final = 120.0
"""Time limit for the result of two new processes."""
_FLOAT32_BYTES = 4


def exchanged_bytes_per_second(
    comm: RingComm, device: torch.device, num_bytes: int = MESSAGE_BYTES, peers: tuple[int, int] | None = None
) -> float:
    """Return the bytes per second that a rank receives while it sends equally many; the best of several tries.

    Collective over ``comm`` of two or more ranks, which pass equal sizes.

    Args:
        comm: exchange of the ring.
        device: device of the sent and received bytes.
        num_bytes: size of a message.
        peers: (rank to send to, rank to receive from); by default the neighbours in a ring of all ranks.
    """
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    following, previous = peers or ((comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)

    def exchange() -> None:
        comm.exchange([(sent, following)], [(received, previous)]).wait()

    return num_bytes / min(run_seconds(exchange, device) for _ in range(REPEATS))


def bytes_per_second_of_nodes(
    comm: RingComm, ranks_per_node: int, device: torch.device, num_bytes: int = MESSAGE_BYTES
) -> tuple[float, float]:
    """Return the bytes per second that the slowest rank receives within its node, and from another node.

    All ranks exchange at the same time and return the same rates. Collective over all processes; ``comm`` consists of
    two or more whole nodes with at least two ranks each.
    """
    first, local_rank = comm.rank - comm.rank % ranks_per_node, comm.rank % ranks_per_node
    within = first + (local_rank + 1) % ranks_per_node, first + (local_rank - 1) % ranks_per_node
    between = (comm.rank + ranks_per_node) % comm.size, (comm.rank - ranks_per_node) % comm.size
    rates = [exchanged_bytes_per_second(comm, device, num_bytes, peers) for peers in (within, between)]
    slowest = torch.tensor(rates, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    return float(slowest[0]), float(slowest[1])


def collective_seconds_per_byte(
    group: dist.ProcessGroup, device: torch.device, num_bytes: int = MESSAGE_BYTES
) -> float:
    """Return the seconds per byte that a rank receives in an all-gather or a reduce-scatter.

    The result is the mean of the two, which tensor parallelism uses equally often. Of several tries the fastest counts,
    and of all ranks the slowest. Collective over all processes, each with its own ``group`` of two or more ranks.
    """
    size = dist.get_world_size(group)
    received_bytes = num_bytes // size * (size - 1)
    return _mean_seconds(group, device, num_bytes // size) / received_bytes


def collective_latency(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the mean seconds of an all-gather and a reduce-scatter with one number per rank. Collective over all."""
    return _mean_seconds(group, device, _FLOAT32_BYTES)


def _mean_seconds(group: dist.ProcessGroup, device: torch.device, own_bytes: int) -> float:
    """Return the mean seconds of an all-gather and a reduce-scatter of ``own_bytes`` per rank, on the slowest rank."""
    own = torch.zeros(own_bytes // _FLOAT32_BYTES, device=device)
    every = torch.zeros(dist.get_world_size(group) * len(own), device=device)
    collectives: tuple[Callable[[], object], ...] = (
        lambda: dist.all_gather_into_tensor(every, own, group=group),
        lambda: dist.reduce_scatter_tensor(own, every, group=group),
    )
    seconds = [[run_seconds(collective, device) for collective in collectives] for _ in range(REPEATS)]
    slowest = torch.tensor(sum(map(min, zip(*seconds, strict=True))) / 2, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def bytes_per_second_of_two_processes(on_cuda: bool) -> float:
    """Return the bytes per second between two new processes on this machine, each with its own GPU or both on CPU.

    Raises:
        ValueError: the processes failed, or took longer than ``START_SECONDS``.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bytescale-") as folder:
        results, sender = context.Pipe(duplex=False)
        store = str(Path(folder) / "store")
        processes = [context.Process(target=_run_rank, args=(rank, store, on_cuda, sender)) for rank in (0, 1)]
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
    """Return the bytes per second between the GPU and page-locked host memory.

    A network card uses the same bus, so the rate estimates what the card could reach.
    """
    host = torch.empty(MESSAGE_BYTES * 8, dtype=torch.uint8, pin_memory=True)
    return 1.0 / copy_seconds_per_byte(host, torch.device("cuda"), Timer(synchronize=torch.cuda.synchronize))


def _run_rank(rank: int, store: str, on_cuda: bool, sender: Connection) -> None:
    """Measure the rate in one of two processes; rank 0 sends it through ``sender``."""
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
