"""What a step has done to each source: counts, bytes and a few examples, in a small file for each task."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

EXAMPLES: Final = 3
_EXCERPT: Final = 120  # characters of an example


@dataclass
class Tally:
    """Counts of one step.

    Attributes:
        counts: documents by source and by what was done to them.
        num_bytes: bytes of text by the same.
        examples: up to ``EXAMPLES`` excerpts of what was done.
    """

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    num_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    examples: dict[str, list[dict[str, object]]] = field(default_factory=dict)

    def add(self, source: str, what: str, documents: int = 1, num_bytes: int = 0) -> None:
        """Count documents and bytes."""
        for table, value in ((self.counts, documents), (self.num_bytes, num_bytes)):
            of_source = table.setdefault(source, {})
            of_source[what] = of_source.get(what, 0) + value

    def example(self, what: str, name: str, text: str, **more: object) -> None:
        """Keep an excerpt, as long as there are few."""
        kept = self.examples.setdefault(what, [])
        if len(kept) < EXAMPLES:
            kept.append({"document": name, "text": " ".join(text[: 4 * _EXCERPT].split())[:_EXCERPT], **more})

    def save(self, path: Path) -> None:
        """Write the counts; the file has its name once it is whole."""
        write_whole(path, json.dumps({"counts": self.counts, "num_bytes": self.num_bytes, "examples": self.examples}))


def merged(paths: Iterable[Path]) -> Tally:
    """Return the sum of the counts in several files, and examples of the first ones."""
    total = Tally()
    for path in sorted(paths):
        values = json.loads(path.read_text(encoding="utf-8"))
        for source, counts in values["counts"].items():
            for what, documents in counts.items():
                total.add(source, what, documents, values["num_bytes"][source][what])
        for what, examples in values["examples"].items():
            kept = total.examples.setdefault(what, [])
            kept += examples[: EXAMPLES - len(kept)]
    return total


def write_whole(path: Path, text: str) -> None:
    """Write a file that has its name only once it is whole, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
