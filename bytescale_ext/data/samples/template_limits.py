"""Limits of time and memory for chat templates, which are programs of whoever wrote the tokenizer's folder."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

SECONDS: Final = 20.0
"""Time of all renderings of one conversation."""
BYTES: Final = 1 << 30
"""Memory that the renderings of one conversation may add."""
_POWER: Final = re.compile(r"\{[{%](?:(?!\}\}|%\}).)*\*\*", re.DOTALL)


def check_template(template: str | Mapping[str, str] | None) -> None:
    """Raise ValueError for a template with powers: one operation of numbers could run for days."""
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    if any(isinstance(text, str) and _POWER.search(text) for text in texts):
        raise ValueError("the chat template has a power (**), which could run without end: remove it")


@contextlib.contextmanager
def limits(seconds: float = SECONDS, num_bytes: int = BYTES) -> Iterator[None]:
    """Raise ValueError if the block takes more time or memory. Other threads keep the process's limits."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGALRM) if is_main else None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + num_bytes
    limits_memory = soft == resource.RLIM_INFINITY or limit < soft
    ended: list[bool] = []

    def end(*_: object) -> None:
        ended.append(True)
        raise TimeoutError

    try:
        if limits_memory:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        if is_main:
            signal.signal(signal.SIGALRM, end)
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again and again, in case an error handler caught it
        yield
    except Exception as error:
        if isinstance(error, MemoryError):
            raise ValueError(f"the chat template needs more than {num_bytes >> 20:,} MiB of memory") from None
        if not ended:
            raise
        raise ValueError(f"the chat template takes longer than {seconds:g} s for one conversation") from None
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        if limits_memory:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Return the bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
