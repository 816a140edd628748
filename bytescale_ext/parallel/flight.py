"""NCCL calls of this process that have not ended, from torch's flight recorder.

With NCCL no call raises an error if a peer is gone: the host goes on, and the device waits. After the timeout of a
group torch's watchdog ends the process, and no Python code runs any more. So a thread looks before that time.
"""

from __future__ import annotations

import pickle
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

import torch
import torch.distributed as dist

from bytescale_ext.parallel.faults import named_ranks

PATIENCE: Final = 0.9
"""Share of the timeout after which an open call is told."""
LOOKS: Final = 40
"""Number of looks within the timeout."""
STANDSTILL: Final = 0.5
"""Share of the timeout without progress after which the flight recorder is read, which takes time in long records."""


class Entry(TypedDict):
    """A call in the flight recorder: the part of torch's record that is read here."""

    profiling_name: str
    process_group: tuple[str, str]
    pg_id: int
    p2p_seq_id: int
    is_p2p: bool
    state: str
    retired: bool
    time_created_ns: int


class Recorded(TypedDict, total=False):
    """The flight recorder's calls, and the members of each group as text."""

    entries: list[Entry]
    pg_config: dict[str, dict[str, str]]


@dataclass(frozen=True)
class OpenCall:
    """A call of NCCL that has not ended.

    Attributes:
        operation: collective, such as "all_reduce", or "exchange" for messages.
        group: description of its process group.
        ranks: global ranks at the other ends of messages, or of all members of a collective.
        begun: time of the call, in seconds since the epoch.
    """

    operation: str
    group: str
    ranks: tuple[int, ...]
    begun: float

    def __str__(self) -> str:
        return f"{self.operation} of {self.group} with {named_ranks(self.ranks)}"


def recorded_calls() -> Recorded:
    """Return the flight recorder's calls and groups; no calls without NCCL. Stacks are left out, as they need locks."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return {}
    recorded: Recorded = pickle.loads(dump(True, False, False))
    return recorded


def oldest_open_call(recorded: Recorded) -> OpenCall | None:
    """Return the oldest recorded call that has not ended, or None.

    The messages of a batch are recorded one by one, but only a following entry for the whole batch ever ends.
    """
    entries = recorded.get("entries", [])
    messages: dict[tuple[int, int], list[Entry]] = {}
    batches = {_place(entry) for entry in entries if entry["profiling_name"] == "nccl:coalesced"}
    for entry in entries:
        if entry["is_p2p"]:
            messages.setdefault(_place(entry), []).append(entry)
    for entry in sorted(entries, key=lambda entry: entry["time_created_ns"]):
        is_part = entry["is_p2p"] and _place(entry) in batches
        if is_part or entry["state"] == "completed" or entry["retired"]:
            continue
        parts = messages.get(_place(entry), []) if entry["profiling_name"] == "nccl:coalesced" else [entry]
        return _open_call(entry, parts, recorded.get("pg_config", {}))
    return None


def _place(entry: Entry) -> tuple[int, int]:
    return entry["pg_id"], entry["p2p_seq_id"]


def _open_call(entry: Entry, parts: list[Entry], groups: dict[str, dict[str, str]]) -> OpenCall:
    name, description = entry["process_group"]
    members = [int(rank) for rank in re.findall(r"\d+", groups.get(name, {}).get("ranks", ""))]
    peers = {
        int(part["profiling_name"].split()[-1].split("<-")[-1].split("->")[-1]) for part in parts if part["is_p2p"]
    }
    ranks = [members[peer] if peer < len(members) else peer for peer in sorted(peers)] if peers else members
    operation = "exchange" if peers else entry["profiling_name"].removeprefix("nccl:")
    return OpenCall(operation, description, tuple(ranks), entry["time_created_ns"] / 1e9)


def place_of_host() -> str:
    """Return the function and file of ours, or of Megatron, that the main thread runs now."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and "threading.py" != path.name:
            return f"{frame.f_code.co_name} ({path.name})"
        frame = frame.f_back
    return "its end"


class Lookout:
    """Thread that tells about the oldest call of NCCL before the watchdog ends the process.

    Args:
        timeout_seconds: timeout of the process groups.
        progress: function that returns a value which changes as the run goes on, such as the number of the step.
        tell: function that receives the call and its age in seconds. It is called once.
    """

    def __init__(
        self, timeout_seconds: float, progress: Callable[[], object], tell: Callable[[OpenCall, float], None]
    ) -> None:
        self._timeout, self._progress, self._tell = timeout_seconds, progress, tell
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lookout", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        last, since = None, time.monotonic()
        while not self._is_over.wait(self._timeout / LOOKS):
            if not dist.is_initialized():
                continue
            if (now := self._progress()) != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since < STANDSTILL * self._timeout:
                continue
            call = oldest_open_call(recorded_calls())
            if call is not None and (seconds := time.time() - call.begun) >= PATIENCE * self._timeout:
                self._tell(call, seconds)
                return
