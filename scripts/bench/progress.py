"""Progress of a bench on stderr: a bar on a terminal, elsewhere one line for each finished part."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich import progress as bars
from rich.console import Console


def progress[Part](parts: Sequence[Part], name: Callable[[Part], str] = str) -> Iterator[Part]:
    """Yield the parts of a bench in order and report the part that runs, by ``name``.

    The bar is drawn twice a second, so that a measurement in this process hardly notices it.
    """
    console = Console(stderr=True)
    columns = (bars.SpinnerColumn(), "{task.description}", bars.BarColumn(), bars.MofNCompleteColumn(),
               bars.TimeElapsedColumn())  # fmt: skip
    with bars.Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=2,
        redirect_stdout=sys.stdout.isatty(),
    ) as bar:
        task = bar.add_task("", total=len(parts))
        for number, part in enumerate(parts, 1):
            bar.update(task, description=name(part))
            begun = time.monotonic()
            yield part
            bar.advance(task)
            if not console.is_terminal:
                seconds = time.monotonic() - begun
                print(f"{number}/{len(parts)} {name(part)}: {seconds:.0f} s", file=sys.stderr, flush=True)
