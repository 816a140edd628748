"""Start the ranks of an emulated cluster, each in its namespace and control group."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bytescale_ext.new_file import new_log
from scripts.cluster.quotas import QuotaGroups
from scripts.cluster.topology import Topology

_MASTER_PORT = "29500"
_KEEPING = (("MALLOC_TRIM_THRESHOLD_", -1, (1 << 31) - 1), ("MALLOC_MMAP_MAX_", -4, 0))
"""Variables of the C library, with their mallopt(3) numbers and values, that make it keep freed memory.

A GPU's allocator keeps it too. Otherwise some ranks get new pages from the system in every step, and others do not.
"""


@dataclass(frozen=True)
class Launch:
    """The program of every rank.

    Attributes:
        command: Python script and its arguments.
        log_dir: folder of the logs; rank r writes ``rank{r}.log``.
        quota_after: text after which quotas are set, once rank 0 has printed it; empty: from the start.
        timeout: seconds after which the ranks are ended.
        is_warm: whether ranks are forks of this process, which has called ``preload``.
    """

    command: tuple[str, ...]
    log_dir: Path
    quota_after: str
    timeout: float
    is_warm: bool = False

    def log(self, rank: int) -> Path:
        """Return the log of a rank."""
        return self.log_dir / f"rank{rank}.log"


class Rank(Protocol):
    """A started process."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""

    def wait(self) -> int:
        """Wait for the end and return the exit code."""


@dataclass
class ForkedRank:
    """A rank that is a fork of this process."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        """See ``Rank``."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """See ``Rank``."""
        code = self._wait(0)
        assert code is not None, f"{self.pid=}"
        return code

    def _wait(self, options: int) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, options)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code


def preload() -> None:
    """Import torch and Megatron on CPU in this process, so warm ranks start with them."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for _, number, value in _KEEPING:
        ctypes.CDLL(None).mallopt(number, value)
    import torch

    torch.set_num_threads(1)  # an earlier import of torch may have started more
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])  # before Megatron is imported
    for name in (
        "train",
        "build",
        "training.pretrain_arguments",
        "features.hdp.build",
        "training.training",
        "cli.profile",
        "training.profile",
    ):
        importlib.import_module(f"megatron.bytescale.{name}")
    importlib.import_module(
        "megatron.core.tokenizers.text"
    )  # transformers and torch's compiler: half of a rank's start
    gc.collect()
    gc.freeze()  # garbage collection in ranks neither visits nor copies these objects


def start_rank(topology: Topology, groups: QuotaGroups, launch: Launch, rank: int) -> Rank:
    """Start one rank in its namespace and control group."""
    environment = rank_environment(topology, rank)

    def enter() -> None:
        (groups.folders[rank] / "cgroup.procs").write_text("0")
        with open(f"/var/run/netns/{topology.namespace(rank)}") as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)

    with new_log(launch.log(rank), is_binary=True) as log:
        if launch.is_warm:
            return fork(lambda: run_warm(launch.command, environment, log.fileno(), enter))
        return subprocess.Popen(
            [sys.executable, *launch.command],
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=enter,
        )


def rank_environment(topology: Topology, rank: int) -> dict[str, str]:
    """Return the environment of a rank: torchrun's variables, one thread, no GPU, and freed memory kept."""
    return {
        **{name: str(value) for name, _, value in _KEEPING},
        **torchrun_variables(rank, topology.num_ranks, topology.ranks_per_node),
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": topology.address(0),
        "MASTER_PORT": _MASTER_PORT,
    }


def torchrun_variables(rank: int, num_ranks: int, ranks_per_node: int) -> dict[str, str]:
    """Return torchrun's variables for the place of a CPU rank, with one thread and no GPU."""
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "GROUP_RANK": str(rank // ranks_per_node),
    }


def fork(child: Callable[[], int]) -> ForkedRank:
    """Fork this process, and end the fork with the exit code that ``child`` returns; 1 if it raises."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return ForkedRank(pid)
    code = 1
    try:
        code = child()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the child must not run the rest of the parent


def run_warm(command: tuple[str, ...], environment: Mapping[str, str], log: int, enter: Callable[[], None]) -> int:
    """Run a script as a program in this process; return its exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)
    enter()
    os.environ.update(environment)
    sys.argv = list(command)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
