"""``python -m megatron.bytescale.launch``: torchrun with exit codes for job scripts.

After SIGTERM torchrun exits with 1 and a traceback, even if all ranks have saved. It also exits with 1 if ranks refuse
their flags with code 2. This command exits with 0 after a save on SIGTERM, or on SIGTERM before the first iteration. It
exits with 2 after bad input, which ``--max-restarts`` does not retry. Otherwise it exits as torchrun does. All
arguments are torchrun's. The stores of the rendezvous listen at the address of the job's network only
(``megatron/bytescale/stores.py``).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from bytescale_ext.errors import LONGEST, one_line
from bytescale_ext.terminal import escape_output
from megatron.bytescale import stores

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

TRACKER = "latest_checkpointed_iteration.txt"  # written by Megatron when a checkpoint is complete
REFUSED = 2  # exit code of a rank that refuses its flags
SECONDS_TO_REFUSE = 3.0  # time for a machine's other ranks to refuse their flags as well
SECONDS_TO_APPEAR = 30.0  # for another node's file on a shared file system
INVALID: Final = (ValueError, AssertionError, RuntimeError, OSError)
"""Types of torchrun's errors about its arguments."""


@dataclass
class LaunchProgress:
    """The output of a run: its last checkpoint and its steps.

    Attributes:
        save: folder of checkpoints, or None.
        metrics: file that grows with each logged iteration, or None.
        at_start, at_signal: state of both outputs at the start and on SIGTERM.
        ranks_started: whether ranks of this machine have been started.
        ranks_failed: whether a rank of this machine has died without a restart since.
    """

    save: Path | None
    metrics: Path | None
    at_start: list[object] = field(default_factory=list)
    at_signal: list[object] = field(default_factory=list)
    ranks_started: bool = False
    ranks_failed: bool = False

    @classmethod
    def of(cls, words: Sequence[str]) -> LaunchProgress:
        """Return the progress of a launch line, read from its ``--save`` and ``--hdp-log-dir``."""
        save, log = value_of(words, "--save"), value_of(words, "--hdp-log-dir")
        progress = cls(Path(save) if save else None, Path(log) / "metrics.jsonl" if log else None)
        progress.at_start = progress.state()
        return progress

    def state(self) -> list[object]:
        """Return the identity of the current checkpoint and metrics."""
        return [_identity(self.save and self.save / TRACKER), _identity(self.metrics)]

    def ended(self) -> tuple[int, str]:
        """Return (exit code, message) for a run that has ended after SIGTERM."""
        if self.metrics is not None and self.state()[1] == self.at_start[1]:
            return 0, "ended on SIGTERM before the first iteration; there was nothing to save"
        if self.save is None:
            return 1, "error: ended on SIGTERM, and there is no --save to continue from"
        if self.ranks_failed:
            return 1, f"error: ended on SIGTERM after a rank had died; {self.save} has the last checkpoint"
        deadline = time.monotonic() + SECONDS_TO_APPEAR
        while self.state()[0] == self.at_signal[0]:
            if time.monotonic() > deadline:
                return 1, f"error: ended on SIGTERM without a new checkpoint in {self.save}; read the log of rank 0"
            time.sleep(0.2)
        iteration = (self.save / TRACKER).read_text().strip()
        return 0, f"ended on SIGTERM with the checkpoint of iteration {iteration} in {self.save}"


def _identity(path: Path | None) -> object:
    try:
        return None if path is None else (path.stat().st_mtime_ns, path.stat().st_size)
    except OSError:
        return None


def value_of(words: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag, as ``--flag value`` or ``--flag=value``."""
    value = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def note_state_at_signal(progress: LaunchProgress) -> None:
    """Record the run's state when a signal arrives, before torchrun passes the signal to the ranks."""
    from torch.distributed.elastic.multiprocessing import api

    handler = api._terminate_process_handler

    def note_and_end(signum: int, frame: FrameType | None) -> None:
        progress.at_signal = progress.state()
        handler(signum, frame)

    api._terminate_process_handler = note_and_end


def follow_ranks(progress: LaunchProgress) -> None:
    """Record whether ranks have started and failed. After a refusal of flags, do not restart ranks or wait for them.

    torchrun waits 30 s for ranks that ignore SIGTERM, which includes ranks that wait in a collective for the rank that
    refused its flags.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.launcher import api

    class FollowedAgent(api.LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            started = super()._start_workers(worker_group)
            progress.ranks_started = True
            return started

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            end_after_refusal(list(getattr(self._pcontext, "subprocess_handlers", {}).values()))
            result = super()._monitor_workers(worker_group)
            progress.ranks_failed = result.is_failed()
            if any(failure.exitcode == REFUSED for failure in result.failures.values()):
                self._remaining_restarts = 0
            return result

    api.LocalElasticAgent = FollowedAgent  # type: ignore[misc]


def end_after_refusal(ranks: Sequence[SubprocessHandler]) -> None:
    """If a process has refused its flags, give the others a moment to refuse theirs, then kill the rest."""
    if all(rank.proc.poll() != REFUSED for rank in ranks):
        return
    deadline = time.monotonic() + SECONDS_TO_REFUSE
    while any(rank.proc.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    for rank in ranks:
        if rank.proc.poll() is None:
            rank.close(signal.SIGKILL)


def main(words: Sequence[str] | None = None) -> int:
    """Run torchrun with these arguments; return the exit code."""
    escape_output()
    words = sys.argv[1:] if words is None else words
    signal.signal(signal.SIGTERM, _end_before_ranks)
    progress = LaunchProgress.of(words)
    note_state_at_signal(progress)
    follow_ranks(progress)
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    arguments = run.parse_args(list(words))
    if arguments.module:  # ranks must not import modules of the current folder
        os.environ["PYTHONSAFEPATH"] = "1"
    try:
        vars(arguments).update(listen_on_own_network(arguments))
    except ValueError as error:
        print(f"bytescale launch: error: {error}", file=sys.stderr)
        return REFUSED
    try:
        record(run.run)(arguments)
    except SignalException as error:
        if error.sigval != signal.SIGTERM:
            return 128 + error.sigval
        code, message = progress.ended()
        print(f"bytescale launch: {message}", file=sys.stderr)
        return code
    except ChildFailedError as error:
        if any(failure.exitcode == REFUSED for failure in error.failures.values()):  # its last line has the reason
            return REFUSED
        raise
    except (*INVALID, RendezvousError) as error:
        if progress.ranks_started:
            raise
        is_refused = isinstance(error, INVALID) and not isinstance(error, DistError)
        subject = "torchrun refuses its arguments: " if is_refused else ""
        print(f"bytescale launch: error: {subject}{message_of(error)}", file=sys.stderr)
        return REFUSED if is_refused else 1
    return 0


def message_of(error: Exception) -> str:
    """Return one line about an error of torchrun before it started ranks."""
    text = one_line(error, LONGEST)
    if not text and isinstance(error, AssertionError):
        text = "--nproc-per-node and --monitor-interval must be positive"
    if type(error).__name__ == "RendezvousTimeoutError":
        text = "not all nodes came in time; --rdzv-conf join_timeout=SECONDS waits longer"
    return text or type(error).__name__


def listen_on_own_network(arguments: Namespace) -> dict[str, str]:
    """Bind the stores of the rendezvous to the job's network; return arguments of torchrun to replace.

    The network of a job on one machine is the loopback interface. With several nodes it is the network that leads to
    the host of the rendezvous.

    Raises:
        ValueError: this machine hosts the rendezvous, and its address in the network is unknown.
    """
    is_one_node = arguments.standalone or arguments.nnodes in ("1", "1:1")
    endpoint = "" if arguments.standalone else arguments.rdzv_endpoint
    is_static = not endpoint and not is_one_node
    if is_static:
        endpoint = arguments.master_addr or ""
    host = (endpoint.rpartition(":")[0] or endpoint or stores.LOOPBACK).strip("[]")
    address = arguments.local_addr or stores.hosting_address(host, is_one_node)
    stores.bind_rendezvous(is_one_node)
    if address is None and is_one_node:
        address = stores.LOOPBACK
    if address is None:
        return {}
    if stores.is_loopback(address):
        stores.use_loopback()
        address = address if arguments.local_addr else stores.LOOPBACK
    else:
        stores.use_interface_of(address)
    replaced = {"local_addr": address}
    if is_static and stores.is_own(host):  # the name can mean another address here than on other nodes
        replaced["master_addr"] = address
    return replaced


def _end_before_ranks(*_: object) -> None:
    """End the process; torchrun replaces this signal handler when it starts the ranks."""
    print("bytescale launch: ended on SIGTERM before the ranks were started", file=sys.stderr)
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
