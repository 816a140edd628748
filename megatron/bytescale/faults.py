"""The last log line of a rank that loses a peer or cannot save: step, failure, peers, and where to look."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import traceback
from collections.abc import Iterator

import torch.distributed as dist

from bytescale_ext.parallel.faults import PeerLost, failure_text, is_peer_error
from bytescale_ext.parallel.flight import Lookout, OpenCall, place_of_host
from megatron.bytescale.arguments.options import current
from megatron.bytescale.arguments.running import Interruptions, TrainingProgress


class SaveFailed(RuntimeError):
    """A checkpoint could not be written."""


@contextlib.contextmanager
def named_faults() -> Iterator[None]:
    """Convert errors of ``torch.distributed`` about a peer to a ``PeerLost`` that names the failure and the step.

    Errors during the save of a checkpoint become a ``SaveFailed``.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException does not derive from Exception
        if isinstance(error, RuntimeError) and is_peer_error(error):
            raise PeerLost(f"{_when()}: {failure_text(error)}. {_advice()}") from error
        if any(frame.name == "save_checkpoint" for frame in traceback.extract_tb(error.__traceback__)):
            raise SaveFailed(f"{_when()}: {_save_text(error)}") from error
        raise


@contextlib.contextmanager
def told_before_the_watchdog(timeout_minutes: float) -> Iterator[None]:
    """Print the last line of a rank whose NCCL calls do not end, before torch's watchdog ends the process."""
    with Lookout(60 * timeout_minutes, lambda: current(TrainingProgress).curr_iteration, _tell):
        yield


def _tell(call: OpenCall, seconds: float) -> None:
    text = f"the {call} has not ended for {seconds:.0f} s; the host is in {place_of_host()}"
    print(f"PeerLost: {_when()}: {text}. {_advice()}", file=sys.stderr, flush=True)


WATCHDOG_VARIABLES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
ENDING = ("1", "3")
"""Values with which the watchdog ends the process."""


def check_watchdog() -> None:
    """Raise ValueError for settings with which a rank that has lost a peer hangs, or goes on with wrong numbers."""
    for name in WATCHDOG_VARIABLES:
        value = os.environ.get(name)
        if value is not None and value not in ENDING:
            raise ValueError(
                f"{name}={value}: a rank that has lost a peer would hang or go on with wrong numbers; unset it"
            )


def _save_text(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = lines[-1] if lines else type(error).__name__
    if cause.startswith("CheckpointException"):  # it omits the errors of the ranks that failed to write
        cause = "the log of another rank has the cause"
    folder = current(Interruptions).save or "."
    free = shutil.disk_usage(folder).free
    return (
        f"saving the checkpoint in {folder} failed: {cause}. {free / 1e6:,.1f} MB are free "
        "there; check the file system and start again: the run resumes from the last whole checkpoint"
    )


def _when() -> str:
    done = current(TrainingProgress).curr_iteration
    step = "before the first step" if done is None else f"step {done + 1}"
    return f"rank {dist.get_rank()}, {step}" if dist.is_initialized() else step


def _advice() -> str:
    minutes = current(Interruptions).distributed_timeout_minutes
    return (
        "A rank has ended or hangs, or the network to it is down: the log that ended first has the cause. Otherwise "
        f"check the hosts and links of the other ranks; a rank that is silent for {minutes:g} minutes "
        "(--distributed-timeout-minutes) ends the run"
    )
