"""Settings of training on windows of related documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bytescale_ext.data.corpus.windows_file import load_windows
from bytescale_ext.plan.sculpt.pieces import window_bounds

ATTENTION: Final = ("window", "document")
"""What tokens of a window attend to: everything before them in the window, or in their document alone."""


@dataclass(frozen=True)
class SculptConfig:
    """Windows take the place of documents: each is one sample.

    Attributes:
        files: the file of windows of each data set, by the data set's prefix.
        attention: one of ``ATTENTION``.
    """

    files: Mapping[str, Path]
    attention: str

    def tables(self) -> dict[str, np.ndarray]:
        """Return the table of windows [rows] of each data set, mapped from its file."""
        return {prefix: load_windows(path)[0] for prefix, path in self.files.items()}

    def drawn(self, number: int, seed: int) -> list[int]:
        """Return the lengths of what a plan places for randomly drawn windows, of all data sets together."""
        samples: list[Sequence[int]] = []
        for table in self.tables().values():
            windows = np.split(table["length"], window_bounds(table)[1:-1])
            samples += [[int(one.sum())] if self.attention == "window" else one.tolist() for one in windows]
        chosen = np.random.default_rng(seed).choice(len(samples), number, replace=len(samples) < number)
        return [length for one in chosen.tolist() for length in samples[one]]
