"""Trace of a rank on ghost GPUs: what it tells its device, and the lines of Python that make the host wait."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

# Frames of torch and of the kernels do not say who waits.
_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
_ROOTS = ("site-packages/", f"{Path(__file__).resolve().parents[2]}/")
_is_tracing = False


@cache
def runtime() -> Any:
    """Return the functions of the ghost libraries of this process."""
    return ctypes.CDLL(None)


def trace_to(file: Path | None) -> None:
    """Write the trace of this process to a file from now on, or end it."""
    global _is_tracing
    if not _is_tracing:
        for owner, name in ((torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize")):
            setattr(owner, name, _with_place(getattr(owner, name)))
        torch.cuda.synchronize = _with_place(torch.cuda.synchronize)
    _is_tracing = file is not None
    runtime().ghost_trace_to(str(file).encode() if file else None)


def mark(line: str) -> None:
    """Write a line of words to the trace."""
    runtime().ghost_trace(line.encode())


def note_wait() -> None:
    """Write that the host waits here for the default stream: it reads a value, or copies pageable memory."""
    if _is_tracing:
        mark(f"AT {_place()}")
        mark("HOST_WAIT stream 0")


def _with_place(wait: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wait)
    def wait_at_place(*args: Any, **kwargs: Any) -> Any:
        if _is_tracing:
            mark(f"AT {_place()}")
        return wait(*args, **kwargs)

    return wait_at_place


def _place() -> str:
    """Return the file and the line of the innermost frame outside torch and the kernels."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HIDDEN):
        frame = frame.f_back
    name = frame.f_code.co_filename
    for root in _ROOTS:
        name = name.split(root)[-1]
    return f"{name}:{frame.f_code.co_name}"
