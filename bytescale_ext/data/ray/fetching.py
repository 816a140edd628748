"""Answers of actors: waiting with a timeout, repeated calls, and errors with their original type."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from bytescale_ext.data.ray.session import ray_module

_POLL_SECONDS = 0.5  # between two calls of should_stop
_ANSWER_SECONDS = 600.0  # more than any call takes, including a restart
_REPEAT_SECONDS = 120.0  # time without an answer after which a call is repeated
_SHARED_SECONDS = 10.0  # time limit for a value that is in the object store already
_ATTEMPTS = 5


class Reference[Value](Protocol):
    """Future answer of an actor's method; Ray's ``ObjectRef``."""

    def __await__(self) -> Generator[object, None, Value]: ...


class RemoteMethod[**Arguments, Value](Protocol):
    """Method of an actor's handle."""

    def remote(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Reference[Value]:
        """Start a call of the method in the actor's process."""


def fetch[Value](
    reference: Reference[Value], should_stop: Callable[[], bool] = bool, seconds: float = _ANSWER_SECONDS
) -> Value:
    """Return the value of a reference, like ``ray.get``, but raise the actor's error with its original type.

    Raises:
        TimeoutError: there is no answer for ``seconds``.
        RuntimeError: ``should_stop`` returned True.
    """
    ray = ray_module()
    deadline = time.monotonic() + seconds
    while not should_stop():
        try:
            value: Value = ray.get(reference, timeout=_POLL_SECONDS)
            return value
        except ray.exceptions.GetTimeoutError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"--hdp-loader ray: no answer from an actor for {seconds:g} s; Ray's logs are in "
                    "/tmp/ray/session_latest/logs"
                ) from None
        except ray.exceptions.RayTaskError as error:
            cause: BaseException = error
            while isinstance(inner := getattr(cause, "cause", None), BaseException):
                cause = inner
            raise cause from None
    raise RuntimeError("the loader is closed")


def fetch_answers[Value](
    calls: Sequence[Callable[[], Reference[Value]]], should_stop: Callable[[], bool] = bool
) -> list[Value]:
    """Start all calls together and return their answers. A call without an answer is repeated a few times."""
    begun = [call() for call in calls]
    return [_answer(call, reference, should_stop) for call, reference in zip(calls, begun, strict=True)]


def _answer[Value](
    call: Callable[[], Reference[Value]], reference: Reference[Value], should_stop: Callable[[], bool]
) -> Value:
    for _ in range(_ATTEMPTS - 1):
        try:
            return fetch(reference, should_stop, _REPEAT_SECONDS)
        except TimeoutError:
            reference = call()
    return fetch(reference, should_stop, _REPEAT_SECONDS)


def fetch_shared[Value](
    call: Callable[[], Reference[list[Reference[Value]]]], should_stop: Callable[[], bool] = bool
) -> Value:
    """Return a shared value, given a call that returns a list with its reference.

    The call is repeated if it returns an empty list, or if the value is lost. A value is lost with the actor that made
    it, or if a process drops one reference to the value while it receives another.

    Raises:
        TimeoutError: there is no answer, or the value cannot be fetched in any attempt.
    """
    ray = ray_module()
    attempts_left = _ATTEMPTS
    while True:
        shared: list[Reference[Value]] = []
        while not shared:
            (shared,) = fetch_answers([call], should_stop)
        try:
            return fetch(shared[0], should_stop, _SHARED_SECONDS)
        except (ray.exceptions.ObjectLostError, TimeoutError):
            attempts_left -= 1
            if not attempts_left:
                raise
            time.sleep(0.1)


def fetch_first[Value](reference: Reference[Value]) -> Value:
    """Return an actor's first answer. Raises ValueError if the actor cannot start."""
    try:
        return fetch(reference)
    except ray_module().exceptions.RayActorError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(
            f"--hdp-loader ray: an actor cannot start ({reason}): install this package on every machine of the cluster"
        ) from error
