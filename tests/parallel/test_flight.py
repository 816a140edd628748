"""Calls of NCCL that have not ended, from records as torch's flight recorder makes them."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest

from bytescale_ext.parallel import flight
from bytescale_ext.parallel.flight import Lookout, OpenCall, oldest_open_call, place_of_host

GROUPS = {"0": {"ranks": "[0, 1, 2, 3]"}, "5": {"ranks": "[1, 3]"}}


def call(name: str, begun: int, state: str = "completed", group: str = "0", batch: int = 0) -> dict[str, Any]:
    """Return an entry. Messages of a batch never end; the entry of the batch does."""
    is_message = "send" in name or "recv" in name
    return {
        "profiling_name": f"nccl:{name}", "process_group": (group, f"GROUP_{group}"), "pg_id": int(group),
        "p2p_seq_id": batch, "is_p2p": is_message, "state": state, "retired": state == "completed",
        "time_created_ns": begun * 10**9,
    }  # fmt: skip


def batch_of(number: int, begun: int, state: str) -> list[dict[str, Any]]:
    messages = [call(name, begun, "scheduled", "5", number) for name in ("send 0->1", "recv 0<-1")]
    return [*messages, call("coalesced", begun, state, "5", number)]


def recorded(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"entries": list(entries), "pg_config": GROUPS}


def test_nothing_is_open() -> None:
    assert oldest_open_call({}) is None
    assert oldest_open_call(recorded(call("all_reduce", 1), *batch_of(1, 2, "completed"))) is None


def test_the_oldest_open_call_is_named() -> None:
    ended = batch_of(1, 1, "completed")
    reduction, exchange = call("all_reduce", 4, "started"), batch_of(2, 3, "scheduled")
    found = oldest_open_call(recorded(*ended, reduction, *exchange))
    assert found == OpenCall("exchange", "GROUP_5", (3,), 3.0)
    assert str(found) == "exchange of GROUP_5 with rank 3"
    found = oldest_open_call(recorded(*ended, reduction))
    assert str(found) == "all_reduce of GROUP_0 with ranks 0, 1, 2, 3"


def test_a_message_without_a_batch() -> None:
    assert oldest_open_call(recorded(call("recv 0<-2", 1, "scheduled"))) == OpenCall("exchange", "GROUP_0", (2,), 1.0)


@pytest.mark.slow
def test_a_call_is_told_once_and_only_late(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[OpenCall, float]] = []
    is_told, begun = threading.Event(), int(time.time())
    monkeypatch.setattr(flight.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(flight, "recorded_calls", lambda: recorded(call("all_reduce", begun, "started")))
    with Lookout(1000.0, lambda: 1, lambda *of_call: told.append(of_call)):
        pass
    assert told == []
    monkeypatch.setattr(flight, "recorded_calls", lambda: recorded(call("all_reduce", begun - 100, "started")))
    steps = iter(range(30))  # the first steps go on
    with Lookout(0.4, lambda: next(steps, None), lambda *of_call: (told.append(of_call), is_told.set())):
        assert is_told.wait(60)
        assert next(steps, None) is None
    ((open_call, seconds),) = told
    assert open_call.operation == "all_reduce"
    assert 99 < seconds < 200


def test_the_place_of_the_host_is_a_function() -> None:
    assert re.fullmatch(r".+ \(.+\.py\)", place_of_host())
