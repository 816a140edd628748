"""The last log line of a rank that loses a peer or cannot save: step, failure, peers, and where to look."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Final, NoReturn

import torch.distributed as dist

from bytescale_ext.parallel.faults import PeerLost, failure_text, is_peer_error
from bytescale_ext.parallel.flight import Lookout, OpenCall, place_of_host
from bytescale_ext.states.page_file import PagesDamaged
from megatron.bytescale.arguments.bad_input import TRACEBACK, Refused, write_error_file
from megatron.bytescale.arguments.options import current
from megatron.bytescale.arguments.running import Interruptions, TrainingProgress
from megatron.bytescale.before_first_step import line_of


class SaveFailed(RuntimeError):
    """A checkpoint could not be written."""


_SECONDS_TO_AGREE: Final = 5.0
_OF_SETTINGS: Final = (AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
"""Errors of a save that come from settings; torch and the system report files by RuntimeError and OSError."""

_FAULT_REPEATED: Final = 16
"""Exit code of Megatron's ``RerunStateMachine`` after a fault that came twice on one GPU."""

_EXPLAINED: Final = (PeerLost, SaveFailed, PagesDamaged)
"""Errors whose message says everything that a user needs."""


@contextlib.contextmanager
def named_faults() -> Iterator[None]:
    """Convert errors of ``torch.distributed`` about a peer to a ``PeerLost`` that names the failure and the step.

    Errors during the save of a checkpoint become a ``SaveFailed``. Before the first step, errors about settings and
    checkpoints, and exits of Megatron that did not do their work, become a ``Refused``.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except SystemExit as end:
        if _is_before_first_step() and (line := line_of(end, current(Interruptions).load)):
            raise Refused(line) from end
        raise
    except BaseException as error:  # torch's CheckpointException does not derive from Exception
        if isinstance(error, RuntimeError) and is_peer_error(error):
            raise PeerLost(f"{_when()}: {failure_text(error)}. {_advice()}") from error
        if any(frame.name == "save_checkpoint" for frame in traceback.extract_tb(error.__traceback__)):
            if current(Interruptions).save is None:  # only a repeated fault makes Megatron save without --save
                _end_unsaved()
            raise SaveFailed(f"{_when()}: {_save_text(error)}") from error
        if _is_before_first_step() and (line := line_of(error, current(Interruptions).load)):
            raise Refused(line) from error
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


def is_first_to_say(message: str) -> bool:
    """Return whether no other process of the job has printed this message; all ranks may meet the same error."""
    if not dist.is_initialized():
        return True
    name = f"bytescale/{hashlib.sha256(message.encode()).hexdigest()}"
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=_SECONDS_TO_AGREE))
        return int(store.add(name, 1)) == 1
    except RuntimeError:  # the process that holds the store has ended
        return True


def explain_in_one_line(kind: type[BaseException], error: BaseException, calls: TracebackType | None) -> None:
    """Hook in ``sys.excepthook``: print explained errors without the calls, and write the reason for torchrun."""
    line = f"{kind.__name__}: {error}"
    write_error_file(line)
    if isinstance(error, _EXPLAINED) and TRACEBACK not in sys.argv:
        print(line, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, calls)


def _end_unsaved() -> NoReturn:
    """End a run without ``--save`` after a fault that Megatron wants to save, with Megatron's exit code."""
    line = f"{_when()}: the result was wrong twice (the lines above name it); without --save no checkpoint is written"
    write_error_file(line)
    if is_first_to_say(line.partition(", ")[2]):
        print(line, file=sys.stderr)
    sys.exit(_FAULT_REPEATED)


def _is_before_first_step() -> bool:
    return current(TrainingProgress).curr_iteration is None


def _save_text(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = lines[-1] if lines else type(error).__name__
    if cause.startswith("CheckpointException"):  # it omits the errors of the ranks that failed to write
        cause = "the log of another rank has the cause"
    folder = current(Interruptions).save or "."
    if wrong := _first_of_settings(error):
        cause = cause if str(wrong) else f"{type(wrong).__name__} at this check: {_last_line(wrong)}"
        return (
            f"saving the checkpoint in {folder} failed: {cause}. Megatron cannot save these settings; the file system "
            f"is not the reason: change the settings, such as --ckpt-format or --optimizer ({TRACEBACK} prints the "
            "calls). Start again: the run resumes from the last whole checkpoint"
        )
    free = shutil.disk_usage(folder).free
    return (
        f"saving the checkpoint in {folder} failed: {cause}. {free / 1e6:,.1f} MB are free "
        "there; check the file system and start again: the run resumes from the last whole checkpoint"
    )


def _first_of_settings(error: BaseException) -> BaseException | None:
    """Return the first error of a rank that files do not cause; None if all errors may come from files.

    ``error``: error of a save. torch's CheckpointException holds the errors of all ranks.
    """
    failures = getattr(error, "failures", None) or {0: (error, None)}
    errors = [failure[0] for _, failure in sorted(failures.items())]
    return next((one for one in errors if isinstance(one, _OF_SETTINGS)), None)


def _last_line(error: BaseException) -> str:
    """Return the source line that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line if frames else None) or "no source line"


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
