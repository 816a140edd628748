"""Tallies of a step: counts, bytes and a few examples for each source, in a small file for each task."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bytescale_ext.json_input import json_settings
from bytescale_ext.new_file import write_text

EXAMPLES: Final = 3
JSON_AS_TEXT: Final = "files of JSON read as text"
_EXCERPT: Final = 120  # characters of an example


@dataclass
class Tally:
    """Counts of one step.

    Attributes:
        counts: number of documents by source and outcome.
        num_bytes: bytes of text by source and outcome.
        examples: up to ``EXAMPLES`` excerpts by outcome.
    """

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    num_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    examples: dict[str, list[dict[str, object]]] = field(default_factory=dict)

    def add(self, source: str, outcome: str, documents: int = 1, num_bytes: int = 0) -> None:
        """Count documents and bytes."""
        for table, value in ((self.counts, documents), (self.num_bytes, num_bytes)):
            by_outcome = table.setdefault(source, {})
            by_outcome[outcome] = by_outcome.get(outcome, 0) + value

    def example(self, outcome: str, name: str, text: str, **more: object) -> None:
        """Store an excerpt of a document, unless there are ``EXAMPLES`` already."""
        examples = self.examples.setdefault(outcome, [])
        if len(examples) < EXAMPLES:
            examples.append({"document": name, "text": " ".join(text[: 4 * _EXCERPT].split())[:_EXCERPT], **more})

    def save(self, path: Path) -> None:
        """Write the tally; see ``write_whole``."""
        write_whole(path, json.dumps({"counts": self.counts, "num_bytes": self.num_bytes, "examples": self.examples}))


def merged(paths: Iterable[Path]) -> Tally:
    """Return the sum of the tallies in several files, with the first examples."""
    total = Tally()
    for path in sorted(paths):
        values = json_settings(path.read_text(encoding="utf-8"))
        for source, counts in values["counts"].items():
            for outcome, documents in counts.items():
                total.add(source, outcome, documents, values["num_bytes"][source][outcome])
        for outcome, examples in values["examples"].items():
            first = total.examples.setdefault(outcome, [])
            first += examples[: EXAMPLES - len(first)]
    return total


def write_whole(path: Path, text: str) -> None:
    """Write a text to a temporary file and rename it when it is complete. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
