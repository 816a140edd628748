"""Real trainings of the survey: one with all rows of a line, one without them, and what each leaves behind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.e2e.corpora import documents
from tests.e2e.training import HDP, MODEL, TRAIN, train_apart
from tests.survey.rows import Row

_COMMON = [*MODEL, *TRAIN, *HDP, *"--hdp-tokens-per-rank 256 --cpu --train-iters 4 --split 50,50,0".split()]
TRAININGS: dict[str, list[str]] = {
    "plain training": _COMMON,
    "saved training": [
        *_COMMON,
        *"--save {folder}/save --save-interval 1 --tensorboard-dir {folder}/tensorboard --eval-iters 1".split(),
        *"--timing-log-level 2".split(),
    ],
}
"""Words of each line that trains; {folder} is a folder of the run's own."""


@dataclass(frozen=True)
class Trained:
    """What a training left behind: its text and its folder."""

    text: str
    folder: Path

    def has(self, trace: str) -> bool:
        """Return whether a trace is there: "prints", "writes", "draws" or "saves", and a pattern or name."""
        kind, _, name = trace.partition(" ")
        if kind == "prints":
            return re.search(name, self.text) is not None
        if kind == "writes":
            return any(self.folder.glob(name))
        if kind == "draws":
            return any(re.search(name, tag) for tag in self._tags())
        assert kind == "saves", trace
        (file,) = self.folder.glob("save/iter_0000004/mp_rank_00/*.pt")
        return name in torch.load(file, weights_only=False)

    def _tags(self) -> list[str]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.folder / "tensorboard"))
        events.Reload()
        tags: list[str] = events.Tags()["scalars"]
        return tags


def train_with_rows(folder: Path, rows: Sequence[Row]) -> dict[str, tuple[Trained, Trained]]:
    """Return, by line, what trainings without and with the words of all rows left behind."""
    runs = []
    for line, words in TRAININGS.items():
        added = [word for row in rows if row.line == line for word in row.words]
        runs += [(folder / f"{line} without", words), (folder / line, [*words, *added])]
    for place, _ in runs:
        place.mkdir()
    flags = [
        [*(word.replace("{folder}", str(place)) for word in words), "--data-path", documents()] for place, words in runs
    ]
    texts = [outcome.text for outcome in train_apart(*flags)]
    found = [Trained(text, place) for text, (place, _) in zip(texts, runs, strict=True)]
    return dict(zip(TRAININGS, zip(found[::2], found[1::2], strict=True), strict=True))
