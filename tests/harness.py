"""Tests of several ranks on the CPU: a function runs in W processes that share a gloo process group.

    def sum_of_ranks(rank, world, start):            # at module level: it is pickled by name
        total = torch.tensor([start + rank])
        dist.all_reduce(total)
        return int(total)                            # anything that pickles; tensors travel by value

    def test_sum():
        assert run_ranks(sum_of_ranks, 4, 10) == [46, 46, 46, 46]

Behaviour:

- Processes are forked from a server that has imported torch, Megatron and this project, so a rank starts warm, in
  about 0.1 s. The server starts at the first call, takes some seconds, and serves all tests of the test process.
- Each rank has one thread, the gloo group ``torch.distributed.group.WORLD`` and RANK, WORLD_SIZE, LOCAL_RANK set.
  The group meets through a file, so no port is taken. ``init_group=False`` leaves the group to the function;
  ``world`` is then only a number.
- A rank stays connected after its function has ended, until all functions have ended.
- If ranks fail, ``RanksFailed`` is raised with the traceback of the rank that failed *first*. Other ranks usually
  fail because of it.
- If ranks hang, ``TimeoutError`` names them and shows the stack of each.
- When ``run_ranks`` returns or raises, every process that it started, and all their children, have ended.
- Only tests with the mark ``ranks`` may call it or start Python; others fail (``conftest.py``).

Ranks print to the terminal of the test run. A test that changes global state in a rank needs no clean-up, because
each call has new processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import functools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

PRELOADED = (
    "torch",
    "torch.distributed",
    # torch.utils.checkpoint.checkpoint and torch.autograd.grad import these two, with hundreds of modules, at their
    # first call.
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "numpy",
    "numpy.ma",
    "pytest",
    "hypothesis",
    "tests.e2e.preload",
)
# Many times longer than any test on a slow machine, so only a hang lasts this long.
HANG_SECONDS = 1200.0
# Reports of ranks that fail together arrive in any order. An earlier failure may arrive within this time.
SECONDS_FOR_EARLIER_FAILURES = 2.0
SECONDS_FOR_STACKS = 20.0
SECONDS_TO_END = 60.0


# Whether the running test has the mark "ranks"; conftest.py sets it before each test.
may_start_processes = True


def free_port() -> int:
    """Return a port of the loopback interface that no one listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def check_may_start_processes() -> None:
    """Raise RuntimeError if the running test lacks the mark ``ranks``."""
    if not may_start_processes:
        raise RuntimeError("this test starts processes without the mark: add @pytest.mark.ranks")


@dataclass(frozen=True)
class Devices:
    """Devices of the ranks. Ranks with equal devices are forked from one server.

    Attributes:
        preloaded: modules that the server imports once.
        backend: backend of the process group.
        environment: function that returns further variables for the environment of the server.
    """

    preloaded: tuple[str, ...]
    backend: str
    environment: Callable[[], dict[str, str]] = dict

    @functools.cached_property
    def server(self) -> multiprocessing.forkserver.ForkServer:
        """Server of this test process, which starts with its first rank."""
        server = multiprocessing.forkserver.ForkServer()
        server.set_forkserver_preload(list(self.preloaded))
        return server

    def start(self, process: BaseProcess) -> None:
        """Fork a rank from the server, with Python's own classes, which know one server only."""
        multiprocessing.resource_tracker.ensure_running()  # with the variables of the tests
        forkserver = multiprocessing.forkserver
        with (
            mock.patch.dict(os.environ, self.environment()),
            mock.patch.object(forkserver, "connect_to_new_process", self.server.connect_to_new_process),
        ):
            process.start()


CPUS = Devices(PRELOADED, "gloo")
_devices = CPUS


@contextlib.contextmanager
def ranks_on(devices: Devices) -> Iterator[None]:
    """Run the ranks of this context on other devices than CPUs."""
    global _devices
    before, _devices = _devices, devices
    try:
        yield
    finally:
        _devices = before


class RanksFailed(RuntimeError):
    """A rank raised or died.

    Attributes:
        rank: rank that failed first.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Report:
    """Report that a rank sends at its end."""

    rank: int
    value: Any = None
    error: str | None = None
    at_seconds: float = 0.0


@dataclass
class RankProcess:
    """Started rank; ``report`` is None until the rank ends."""

    process: BaseProcess
    reports: Connection
    stack_file: Path
    report: Report | None = None


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = HANG_SECONDS,
    init_group: bool = True,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Run ``function(rank, world_size, *args)`` in ``world_size`` processes and return their values by rank.

    Args:
        function: a function of a module (not a lambda, not nested).
        world_size: number of processes.
        args: picklable arguments, equal for all ranks.
        timeout: seconds until ranks that have not finished are stopped.
        init_group: whether all ranks first join a gloo process group.
        may_die: ranks that may exit without a value, in tests of failures; their value is None.

    Raises:
        RanksFailed: a rank raised (the message contains its traceback) or died.
        TimeoutError: ranks had not finished in time; the message names them and contains their stacks.
        RuntimeError: the running test is not marked ``ranks``.
    """
    check_may_start_processes()
    call = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[RankProcess] = []
        try:
            for rank in range(world_size):
                ranks.append(_start(rank, world_size, call, Path(folder), timeout if init_group else None))
            _collect(ranks, time.monotonic() + timeout, timeout, frozenset(may_die))
        finally:
            _end_all(ranks)
    return [None if rank.report is None else rank.report.value for rank in ranks]


def _start(rank: int, world_size: int, call: bytes, folder: Path, group_timeout: float | None) -> RankProcess:
    context = multiprocessing.get_context("forkserver")
    mine, of_rank = context.Pipe()
    stack_file = folder / f"stack-{rank}"
    process = context.Process(
        target=_rank_main,
        args=(rank, world_size, call, of_rank, str(folder / "store"), str(stack_file), group_timeout, _devices.backend),
        name=f"rank {rank}",
    )
    _devices.start(process)
    # Only the rank may have this end open, otherwise its death would not be noticed.
    of_rank.close()
    return RankProcess(process, mine, stack_file)


def _collect(ranks: list[RankProcess], deadline: float, timeout: float, may_die: frozenset[int]) -> None:
    """Wait for every rank's report. Raises for failures and at the deadline."""
    open_ranks = dict(enumerate(ranks))
    failures: list[Report] = []
    while open_ranks:
        connections = {item.reports: number for number, item in open_ranks.items()}
        ready = wait(list(connections), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and failures:
            break
        if not ready:
            raise TimeoutError(_describe_hang(open_ranks, timeout))
        for connection in ready:
            number = connections[connection]
            report = _receive(open_ranks.pop(number), number, number in may_die)
            if report.error is not None:
                failures.append(report)
                deadline = min(deadline, time.monotonic() + SECONDS_FOR_EARLIER_FAILURES)
    if failures:
        first = min(failures, key=lambda report: (report.at_seconds, report.rank))
        raise RanksFailed(first.rank, f"rank {first.rank} of {len(ranks)} failed first:\n{first.error}")


def _receive(item: RankProcess, rank: int, may_die: bool) -> Report:
    """Return the report of a rank, or a failure if it ended without one."""
    try:
        item.report = pickle.loads(item.reports.recv_bytes())
    except EOFError:
        item.process.join(SECONDS_TO_END)
        error = None if may_die else f"the process ended without a report, exit code {item.process.exitcode}"
        item.report = Report(rank, error=error, at_seconds=time.monotonic())
    return item.report


def _describe_hang(open_ranks: dict[int, RankProcess], timeout: float) -> str:
    """Return the unfinished ranks as text, each with the stack that it prints on a signal."""
    for item in open_ranks.values():
        with suppress(ProcessLookupError):
            os.kill(item.process.pid or 0, signal.SIGUSR1)
    lines = [f"ranks {sorted(open_ranks)} did not finish in {timeout:g} s"]
    end = time.monotonic() + SECONDS_FOR_STACKS
    for rank, item in sorted(open_ranks.items()):
        lines.append(f"--- rank {rank}\n{_read_stack(item.stack_file, end)}")
    return "\n".join(lines)


def _read_stack(file: Path, end: float) -> str:
    """Return the text of a rank when the file stops growing, or at ``end``."""
    stack = ""
    while True:
        before, stack = stack, file.read_text() if file.exists() else ""
        if time.monotonic() > end or (stack and stack == before):
            return stack or "(no stack)"
        time.sleep(0.1)


def _end_all(ranks: list[RankProcess]) -> None:
    """Kill all running ranks with their children, and wait for their end."""
    for item in ranks:
        if item.report is None or item.report.error is not None:
            _kill(item.process)
        # A rank that has reported ends when it receives this.
        item.reports.close()
    for item in ranks:
        item.process.join(SECONDS_TO_END)
        if item.process.is_alive():
            _kill(item.process)
            item.process.join(SECONDS_TO_END)
        with suppress(ProcessLookupError, PermissionError):  # processes that a rank started and left behind
            os.killpg(item.process.pid or 0, signal.SIGKILL)


def _kill(process: BaseProcess) -> None:
    """Kill a rank and its process group (ranks lead their own)."""
    pid = process.pid or 0
    if process.is_alive():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
        process.kill()


def _rank_main(
    rank: int,
    world_size: int,
    call: bytes,
    reports: Connection,
    store: str,
    stack_file: str,
    group_timeout: float | None,
    backend: str,
) -> None:
    """Run one rank process from start to end."""
    _tie_to_parent()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1")
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            function, args = pickle.loads(call)
            if group_timeout is not None:
                _join_group(rank, world_size, store, group_timeout, backend)
            value = function(rank, world_size, *args)
            report = pickle.dumps(Report(rank, value=value, at_seconds=time.monotonic()))
        except BaseException:
            report = pickle.dumps(Report(rank, error=traceback.format_exc(), at_seconds=time.monotonic()))
        reports.send_bytes(report)
        # Stay until all ranks have reported. A rank that leaves early breaks connections that others are still making,
        # and their errors would hide the first error.
        with suppress(EOFError, OSError):
            reports.recv_bytes()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not a normal exit, because a group with failed peers may hang in its destructor.
        os._exit(0)


def _tie_to_parent() -> None:
    """Lead a process group, and on Linux end together with the fork server, which ends with the test run."""
    with suppress(OSError):
        os.setpgid(0, 0)
    if sys.platform == "linux":
        death_signal_of_parent = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal_of_parent, signal.SIGKILL)


def _join_group(rank: int, world_size: int, store: str, timeout: float, backend: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        # All ranks are on this host, and host names do not resolve everywhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
