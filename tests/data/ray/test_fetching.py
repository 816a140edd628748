"""Missing and lost answers of actors."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from bytescale_ext.data.ray import fetching


class Ray:
    """Fake of the module ``ray``: ``get`` of a function calls it, and None never gets an answer."""

    exceptions = SimpleNamespace(
        GetTimeoutError=type("GetTimeoutError", (TimeoutError,), {}),
        RayTaskError=type("RayTaskError", (Exception,), {}),
        ObjectLostError=type("ObjectLostError", (Exception,), {}),
        RayActorError=type("RayActorError", (Exception,), {}),
    )

    def get(self, reference: Any, timeout: float) -> Any:
        if reference is None:
            time.sleep(0.001)
            raise self.exceptions.GetTimeoutError
        return reference()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Ray:
    ray = Ray()
    monkeypatch.setattr(fetching, "ray_module", lambda: ray)
    for name in ("_REPEAT_SECONDS", "_SHARED_SECONDS"):
        monkeypatch.setattr(fetching, name, 0.01)
    return ray


def test_an_answer_that_does_not_come_is_asked_for_again_and_then_an_error(impatient: Ray) -> None:
    answers = iter([None, None, lambda: 7])
    assert fetching.fetch_answers([lambda: next(answers), lambda: lambda: 8]) == [7, 8]
    calls: list[None] = []
    with pytest.raises(TimeoutError, match=r"no answer from an actor for 0.01 s"):
        fetching.fetch_answers([lambda: calls.append(None)])
    assert len(calls) == 5
    with pytest.raises(RuntimeError, match="the loader is closed"):
        fetching.fetch_answers([lambda: None], should_stop=lambda: True)


@pytest.mark.slow
def test_a_lost_value_is_asked_for_again_and_then_an_error(impatient: Ray) -> None:
    def lost() -> None:
        raise impatient.exceptions.ObjectLostError

    answers = iter([[lost], [None], [], [lambda: 7]])
    assert fetching.fetch_shared(lambda: lambda: next(answers)) == 7
    with pytest.raises(impatient.exceptions.ObjectLostError):
        fetching.fetch_shared(lambda: lambda: [lost])
    with pytest.raises(TimeoutError):
        fetching.fetch_shared(lambda: lambda: [None])


def test_an_error_of_an_actor_has_its_original_type(impatient: Ray) -> None:
    """Ray wraps an error once for each actor that it passed."""

    def fail() -> None:
        error = impatient.exceptions.RayTaskError("of the scheduler")
        error.cause = impatient.exceptions.RayTaskError("of the server")
        error.cause.cause = ValueError("a.jsonl:2: no text")
        raise error

    for call in (fetching.fetch, fetching.fetch_first):
        with pytest.raises(ValueError, match=r"^a.jsonl:2: no text$"):
            call(fail)


def test_an_actor_that_cannot_start_is_an_error_of_one_line(impatient: Ray) -> None:
    def fail() -> None:
        raise impatient.exceptions.RayActorError("The actor died.\nNo module named x")

    with pytest.raises(ValueError, match=r"an actor cannot start \(No module named x\): install this package"):
        fetching.fetch_first(fail)
