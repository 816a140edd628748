"""Report of a cleaned corpus, as JSON and as text: counts of each step and source, with examples."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bytescale_ext.data.clean.output import DataSet
from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.tally import JSON_AS_TEXT, merged, write_whole
from bytescale_ext.json_input import json_settings, printable, stored_bytes

REPORT: Final = "report.json"
_BAD: Final = ("empty", "binary", "broken", "id again", JSON_AS_TEXT)


@dataclass(frozen=True, slots=True)
class SourceReport:
    """Counts of the documents of one source.

    Attributes:
        read: number of documents with text.
        read_bytes: bytes of their text.
        bad: number of unreadable documents by kind, of kept documents with a repeated id, and of files of JSON that
            are read as text.
        filtered: number of documents dropped by each filter and rule.
        masked: number of documents with masked personal data.
        exact: number of documents dropped as exact duplicates.
        near: number of documents dropped as near-duplicates.
        sentences: number of documents that lost repeated sentences.
        sentence_bytes: bytes of these sentences.
        kept: number of remaining documents.
        kept_bytes: bytes of their text.
        weight: sum of their weights.
    """

    read: int
    read_bytes: int
    bad: dict[str, int]
    filtered: dict[str, int]
    masked: int
    exact: int
    near: int
    sentences: int
    sentence_bytes: int
    kept: int
    kept_bytes: int
    weight: float

    @property
    def duplication(self) -> float:
        """Fraction of the documents passing the filters that were dropped as duplicates."""
        passed = self.read - sum(self.filtered.values())
        return (self.exact + self.near) / passed if passed else 0.0

    @property
    def quality(self) -> float:
        """Fraction of the documents that passed the filters; 0 without documents."""
        return 1 - sum(self.filtered.values()) / self.read if self.read else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a corpus.

    Attributes:
        fingerprint: hash of the recipe and its files.
        recipe: fields of the recipe that determine the documents.
        sources: counts of each source.
        data_sets: name, source, weight and shards of each data set, and the prefix of its ``.bin`` or None.
        examples: examples of each outcome.
    """

    fingerprint: str
    recipe: dict[str, object]
    sources: dict[str, SourceReport]
    data_sets: list[dict[str, object]]
    examples: dict[str, list[dict[str, object]]]


def make_report(recipe: Recipe, work: Path, data_sets: Sequence[DataSet], prefixes: dict[str, str]) -> Report:
    """Return the report of the tasks' tallies. ``prefixes``: prefix of each tokenized data set, by name."""
    tally = merged((work / "tallies").glob("*.json"))
    sources = {}
    for source in recipe.sources:
        counts = tally.counts.get(source.name, {})
        num_bytes = tally.num_bytes.get(source.name, {})
        begin, weights = len("filter "), len("weight ")
        sources[source.name] = SourceReport(
            read=counts.get("read", 0),
            read_bytes=num_bytes.get("read", 0),
            bad={outcome: counts[outcome] for outcome in _BAD if outcome in counts},
            filtered={key[begin:]: count for key, count in sorted(counts.items()) if key.startswith("filter ")},
            masked=counts.get("masked", 0),
            exact=counts.get("exact", 0),
            near=counts.get("near", 0),
            sentences=counts.get("sentences", 0),
            sentence_bytes=num_bytes.get("sentences", 0),
            kept=counts.get("kept", 0),
            kept_bytes=num_bytes.get("kept", 0),
            weight=sum(float(key[weights:]) * count for key, count in counts.items() if key.startswith("weight ")),
        )
    sets: list[dict[str, object]] = [
        {
            "name": data_set.name,
            "source": data_set.source,
            "weight": data_set.weight,
            "shards": [str(path) for path in data_set.shards],
            "prefix": prefixes.get(data_set.name),
        }
        for data_set in data_sets
    ]
    return Report(recipe.fingerprint(), recipe.settings(), sources, sets, tally.examples)


def save_report(path: Path, report: Report) -> None:
    """Write a report."""
    write_whole(path, json.dumps(dataclasses.asdict(report), indent=2) + "\n")


def load_report(path: Path) -> Report:
    """Read a report. Raises ValueError if the file is not a report of ``bytescale data clean``, and OSError."""
    try:
        values = json_settings(stored_bytes(path))
        values["sources"] = {name: SourceReport(**counts) for name, counts in values["sources"].items()}
        return Report(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a report of bytescale data clean ({error})") from error


def text_of(report: Report) -> str:
    """Return the report as a table, followed by details of each source, examples and data sets."""
    lines = [f"{'source':<16}{'read':>9}{'filtered':>10}{'exact':>8}{'near':>8}{'kept':>9}{'bytes':>16}{'of read':>9}"]
    for name, source in report.sources.items():
        share = source.kept_bytes / source.read_bytes if source.read_bytes else 0.0
        lines.append(
            f"{name:<16}{source.read:>9,}{sum(source.filtered.values()):>10,}{source.exact:>8,}{source.near:>8,}"
            f"{source.kept:>9,}{source.kept_bytes:>16,}{share:>9.1%}"
        )
    for name, source in report.sources.items():
        details = [f"{count:,} {outcome}" for outcome, count in {**source.bad, **source.filtered}.items()]
        details += [f"{source.masked:,} masked"] if source.masked else []
        if source.sentences:
            details.append(f"{source.sentences:,} lost {source.sentence_bytes:,} bytes of repeated sentences")
        lines += [f"{name}: {', '.join(details)}"] if details else []
    for outcome, examples in report.examples.items():
        for example in examples[:1]:
            more = f" (kept {example['kept']}, {example['jaccard']})" if "kept" in example else ""
            lines.append(f"for example {outcome}: {example['document']}{more}: {example['text']}")
    for data_set in report.data_sets:
        shards = data_set["shards"]
        assert isinstance(shards, list), f"{data_set=}"
        files = data_set["prefix"] or f"{len(shards)} shards"
        lines.append(f"{data_set['name']}, weight {data_set['weight']:g}: {files}")
    return printable("\n".join(lines))
