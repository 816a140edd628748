"""Limits of time and memory for chat templates, which are programs of whoever wrote the tokenizer's folder.

They also hold for the search for the text of a page of HTML, whose time depends on the page. Both run in a process of
their own: nothing can interrupt an operation of C, such as the comparison of two lists that contain themselves many
times, so its process is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Final, cast

from bytescale_ext.errors import one_line

SECONDS: Final = 20.0
"""Time of all renderings of one conversation."""
BYTES: Final = 1 << 30
"""Memory that the renderings of one conversation may add."""
MOST_EXCEEDED: Final = 3
"""Conversations that exceed a limit before a run ends, if it skips them."""
_GRACE: Final = 5.0  # seconds that an interrupted operation has to end after the limit


def check_template(template: str | Mapping[str, str] | None) -> None:
    """Raise ValueError for a template with powers: one operation of numbers could run for days."""
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    if any(isinstance(text, str) and _has_power(text) for text in texts):
        raise ValueError("the chat template has a power (**), which could run without end: remove it")


def _has_power(template: str) -> bool:
    """Return whether a template has the operator ``**`` between two values, not in a text or before arguments."""
    from jinja2 import Environment, TemplateSyntaxError

    before = ""
    try:
        for _, kind, value in Environment().lex(template):
            if kind == "operator" and value == "**" and before not in ("(", ","):
                return True
            before = before if kind == "whitespace" else value
    except TemplateSyntaxError:
        return False  # it cannot be rendered either
    return False


class CallError(Exception):
    """Error that the function of a ``LimitedFunction`` raised, in one line."""


class LimitExceededError(ValueError):
    """A call takes more time or memory than it may."""


class LimitedFunction[Question, Answer]:
    """Function that runs in a process of its own, within limits. Questions and answers are pickled.

    The process is forked at the first call, and again after it was killed. It ends with this object.

    Args:
        function: function of one argument.
        seconds: seconds that a call may take.
        num_bytes: bytes of memory that a call may add.
    """

    def __init__(
        self, function: Callable[[Question], Answer], seconds: float = SECONDS, num_bytes: int = BYTES
    ) -> None:
        self._function = function
        self._limits = seconds, num_bytes
        self._connection: Connection | None = None
        self._end: Callable[[], object] = bool

    def __call__(self, question: Question) -> Answer:
        """Return the function's answer.

        Raises:
            LimitExceededError: the call exceeds a limit.
            ValueError: the function raised a ValueError.
            CallError: the function raised another error.
        """
        connection = self._connection or self._start()
        is_ready = False
        try:
            connection.send(question)
            is_ready = connection.poll(self._limits[0] + _GRACE)
            error, answer = connection.recv() if is_ready else (_too_slow(self._limits[0]), None)
        except (EOFError, OSError):
            reason = "the chat template ended its process: it may need too much memory"
            error, answer = LimitExceededError(reason), None
            is_ready = False
        if not is_ready:
            self._end()
            self._connection = None
        if error is not None:
            raise error
        return cast(Answer, answer)

    def _start(self) -> Connection:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(here, there, self._function, *self._limits), daemon=True)
        process.start()
        there.close()
        self._connection = here
        self._end = weakref.finalize(self, _killed, process.kill, here)
        return here


def _killed(kill: Callable[[], None], connection: Connection) -> None:
    kill()
    connection.close()


def _serve(
    parent: Connection, connection: Connection, function: Callable[..., object], seconds: float, num_bytes: int
) -> None:
    """Answer each question with (error or None, the answer), until the parent ends."""
    parent.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the parent ends this process
    sys.stderr = open(os.devnull, "w")  # Python writes about errors that nothing can catch
    os.dup2(sys.stderr.fileno(), 2)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of the parent are not here
    with contextlib.suppress(EOFError, OSError):
        while True:
            question = connection.recv()
            error: Exception | None = None
            answer: object = None
            try:
                answer = within_limits(partial(function, question), seconds, num_bytes)
            except ValueError as refusal:
                kind = LimitExceededError if isinstance(refusal, LimitExceededError) else ValueError
                error = kind(str(refusal))
            except Exception as other:
                error = CallError(one_line(other, 200))
            connection.send((error, answer))


def within_limits[Answer](call: Callable[[], Answer], seconds: float = SECONDS, num_bytes: int = BYTES) -> Answer:
    """Return ``call()``. Other threads keep the limits of the process.

    Raises:
        LimitExceededError: the call takes more time or memory.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGALRM) if is_main else None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + num_bytes
    limits_memory = soft == resource.RLIM_INFINITY or limit < soft
    has_ended = False

    def run() -> Answer:
        return call()

    def end(_: int, frame: FrameType | None) -> None:
        """Interrupt ``run``. On a busy machine an alarm may come after it, and must interrupt nothing else."""
        nonlocal has_ended
        while frame is not None and frame.f_code is not run.__code__:
            frame = frame.f_back
        if frame is not None:
            has_ended = True
            raise TimeoutError

    try:
        if limits_memory:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        if is_main:
            signal.signal(signal.SIGALRM, end)
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again and again, in case an error handler caught it
        return run()
    except Exception as error:
        if isinstance(error, MemoryError):
            raise LimitExceededError(f"the chat template needs more than {num_bytes >> 20:,} MiB of memory") from None
        if not has_ended:
            raise
        raise _too_slow(seconds) from None
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        if limits_memory:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _too_slow(seconds: float) -> LimitExceededError:
    return LimitExceededError(f"the chat template takes longer than {seconds:g} s for one conversation")


def _address_space() -> int:
    """Return the bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
