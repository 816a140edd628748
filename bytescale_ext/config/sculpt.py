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
"""Range of attention: earlier tokens of the same window, or only earlier tokens of the same document."""


@dataclass(frozen=True)
class SculptConfig:
    """Training on windows instead of documents. Each window is one sample.

    Attributes:
        files: file of windows of each data set, by the prefix of the data set.
        attention: one of ``ATTENTION``.
    """

    files: Mapping[str, Path]
    attention: str

    def tables(self) -> dict[str, np.ndarray]:
        """Return a memory map of the table of windows, [rows], of each data set."""
        return {prefix: load_windows(path)[0] for prefix, path in self.files.items()}

    def shuffled(self) -> frozenset[str]:
        """Return the data sets whose windows have a new order of documents in each epoch."""
        return frozenset(prefix for prefix, path in self.files.items() if load_windows(path)[1].order == "shuffled")

    def drawn(self, number: int, seed: int) -> list[int]:
        """Return the lengths of the sequences that a plan places for random windows from all data sets.

        Args:
            number: number of windows.
            seed: seed of the drawing.
        """
        samples: list[Sequence[int]] = []
        for table in self.tables().values():
            windows = np.split(table["length"], window_bounds(table)[1:-1])
            samples += [[int(rows.sum())] if self.attention == "window" else rows.tolist() for rows in windows]
        chosen = np.random.default_rng(seed).choice(len(samples), number, replace=len(samples) < number)
        return [length for sample in chosen.tolist() for length in samples[sample]]
