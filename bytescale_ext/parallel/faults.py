"""Name what failed when a peer is gone or silent: the message or collective, and the ranks at its other end."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch.distributed as dist

_SIGNS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
_MOST_RANKS_SHOWN = 8


class PeerLost(RuntimeError):
    """A message or a collective failed because a peer has ended, hangs or cannot be reached."""


def is_of_peers(error: RuntimeError) -> bool:
    """Return whether a backend of ``torch.distributed`` raised the error, which is then about a peer."""
    return isinstance(error, (PeerLost, dist.DistError)) or any(sign in str(error) for sign in _SIGNS)


def lost_in_exchange(error: RuntimeError, peers: Iterable[int], kind: str) -> RuntimeError:
    """Return the error of an exchange with these ranks of a kind; the same error if it is about something else."""
    if not is_of_peers(error):
        return error
    return PeerLost(f"the exchange with {kind} {ranks_text(peers)} failed: {one_line(error)}")


def describe(error: RuntimeError) -> str:
    """Return in one line which collective or message failed, of which ranks, where it was called, and the cause."""
    if isinstance(error, PeerLost):
        return str(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    collectives = [frame for frame in frames if frame.f_code.co_filename.endswith("distributed_c10d.py")]
    callers = [frame for frame in frames if "/torch/" not in frame.f_code.co_filename]
    what = _collective_text(collectives[0]) if collectives else "a message"
    where = ""
    if callers:
        code = callers[-1].f_code
        where = f" in {code.co_name} ({Path(code.co_filename).name})"
    return f"{what}{where} failed: {one_line(error)}"


def _collective_text(frame: FrameType) -> str:
    """Return the name of a collective and the ranks of its group, from the frame of its call."""
    name, group = frame.f_code.co_name, frame.f_locals.get("group")
    if name == "wait":  # for one that was started before
        return "a collective"
    if not dist.is_initialized():  # it makes the first group
        return name
    return f"{name} over {ranks_text(dist.get_process_group_ranks(group or dist.group.WORLD))}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as words: "rank 3", "ranks 1, 3", at most eight of them."""
    found = sorted(set(ranks))
    shown = ", ".join(map(str, found[:_MOST_RANKS_SHOWN]))
    more = f" ... ({len(found)} of them)" if len(found) > _MOST_RANKS_SHOWN else ""
    return f"rank{'s' if len(found) != 1 else ''} {shown}{more}"


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())
