"""Helpers of the benches: turns of arms, targets, and commands that train."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


def in_turns[Arm](arms: Sequence[Arm], num_rounds: int) -> list[tuple[int, Arm]]:
    """Return (round, arm) in running order: every other round runs the arms in reverse."""
    return [(number, arm) for number in range(num_rounds) for arm in (arms if number % 2 == 0 else arms[::-1])]


@dataclass(frozen=True)
class Target:
    """A target and the measured figure.

    Attributes:
        text: name of the figure.
        value: measured figure; None if nothing was measured.
        limit: smallest accepted value, or the largest with ``at_most``.
        at_most: whether smaller values are better.
        form: format of the value.
    """

    text: str
    value: float | None
    limit: float
    at_most: bool = False
    form: str = ".4g"

    @property
    def is_met(self) -> bool:
        """Whether the target is met."""
        return self.value is not None and (self.value <= self.limit if self.at_most else self.value >= self.limit)

    @property
    def row(self) -> str:
        """Row of a Markdown table: figure, target, value, verdict."""
        limit = f"at {'most' if self.at_most else 'least'} {self.limit:g}"
        if self.value is None:
            return f"| {self.text} | {limit} | - | not measured |"
        return f"| {self.text} | {limit} | {self.value:{self.form}} | {'met' if self.is_met else '**missed**'} |"


def printed_by(command: Sequence[str]) -> str:
    """Run a command from the root of the project, each process with one thread; return its output.

    Raises:
        RuntimeError: the command failed; the message holds the end of its output.
    """
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"training ended with exit code {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout
