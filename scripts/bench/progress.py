"""Progress of a bench on stderr: a bar on a terminal, elsewhere one line for each finished part."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def progress[Part](parts: Sequence[Part], name: Callable[[Part], str] = str) -> Iterator[Part]:
    """Yield the parts of a bench in order and report the part that runs, by ``name``.

    The bar is drawn twice a second, so that a measurement in this process hardly notices it.
    """
    console = _terminal()
    if console is not None:
        yield from _with_bar(parts, name, console)
        return
    for number, part in enumerate(parts, 1):
        begun = time.monotonic()
        yield part
        seconds = time.monotonic() - begun
        print(f"{number}/{len(parts)} {name(part)}: {seconds:.0f} s", file=sys.stderr, flush=True)


def _terminal() -> Console | None:
    """Return the terminal on stderr; None without a terminal, or without the package rich."""
    if importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console

    console = Console(stderr=True)
    return console if console.is_terminal else None


def _with_bar[Part](parts: Sequence[Part], name: Callable[[Part], str], console: Console) -> Iterator[Part]:
    from rich import progress as bars

    columns = (bars.SpinnerColumn(), "{task.description}", bars.BarColumn(), bars.MofNCompleteColumn(),
               bars.TimeElapsedColumn())  # fmt: skip
    with bars.Progress(*columns, console=console, refresh_per_second=2, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=len(parts))
        for part in parts:
            bar.update(task, description=name(part))
            yield part
            bar.advance(task)
