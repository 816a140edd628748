"""Error messages for a peer that is gone or silent: the failed message or collective and the ranks involved."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from bytescale_ext.errors import one_line

_BACKEND_ERRORS = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
)
_MOST_RANKS_SHOWN = 8


class PeerLost(RuntimeError):
    """A message or a collective failed because a peer has ended, hangs or is out of reach."""


def is_peer_error(error: RuntimeError) -> bool:
    """Return whether a backend of ``torch.distributed`` raised the error, that is, whether a peer caused it."""
    return isinstance(error, (PeerLost, dist.DistError)) or any(text in str(error) for text in _BACKEND_ERRORS)


def exchange_error(error: RuntimeError, peers: Iterable[int], kind: str) -> RuntimeError:
    """Return a ``PeerLost`` that names the ranks of a failed exchange, or ``error`` itself if no peer caused it.

    ``kind`` says how the peers are numbered, such as "HDP".
    """
    if not is_peer_error(error):
        return error
    return PeerLost(f"the exchange with {kind} {named_ranks(peers)} failed: {one_line(error)}")


def failure_text(error: RuntimeError) -> str:
    """Return one line: the collective or message that failed, its ranks, the calling function and the cause."""
    if isinstance(error, PeerLost):
        return str(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    collectives = [frame for frame in frames if frame.f_code.co_filename.endswith("distributed_c10d.py")]
    callers = [frame for frame in frames if "/torch/" not in frame.f_code.co_filename]
    operation = _collective_text(collectives[0]) if collectives else "a message"
    caller = ""
    if callers:
        code = callers[-1].f_code
        caller = f" in {code.co_name} ({Path(code.co_filename).name})"
    return f"{operation}{caller} failed: {one_line(error)}"


def _collective_text(frame: FrameType) -> str:
    """Return the name of a collective and the ranks of its group, read from the frame of its call."""
    name, group = frame.f_code.co_name, frame.f_locals.get("group")
    if name == "wait":  # the frame that started the collective is gone
        return "a collective"
    if not dist.is_initialized():  # the call creates the first group
        return name
    return f"{name} over {named_ranks(dist.get_process_group_ranks(group or dist.group.WORLD))}"


def named_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text, such as "rank 3" or "ranks 1, 3"; at most eight ranks are listed."""
    distinct = sorted(set(ranks))
    shown = ", ".join(map(str, distinct[:_MOST_RANKS_SHOWN]))
    more = f" ... ({len(distinct)} of them)" if len(distinct) > _MOST_RANKS_SHOWN else ""
    return f"rank{'s' if len(distinct) != 1 else ''} {shown}{more}"
