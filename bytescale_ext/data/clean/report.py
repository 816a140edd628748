"""The report of a cleaned corpus: what each step did to each source, with examples; as JSON and as text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bytescale_ext.data.clean.output import DataSet
from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.tally import merged, write_whole

REPORT: Final = "report.json"
_BAD: Final = ("empty", "binary", "broken", "id again")


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What happened to the documents of one source.

    Attributes:
        read, read_bytes: documents with text, and bytes of it.
        bad: documents by what was wrong; those with an id that another one has were kept.
        filtered: documents by the filter and the rule that refused them.
        masked: documents with personal data that were masked.
        exact, near: documents that went as duplicates.
        sentences, sentence_bytes: documents that lost repeated sentences, and how much.
        kept, kept_bytes: what is left.
        weight: the sum of the weights of what is left.
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
        """Share of the documents that passed the filters and went as duplicates."""
        passed = self.read - sum(self.filtered.values())
        return (self.exact + self.near) / passed if passed else 0.0

    @property
    def quality(self) -> float:
        """Share of the documents that passed the filters; 1 where there were none."""
        return 1 - sum(self.filtered.values()) / self.read if self.read else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a corpus. ``data_sets``: name, source, weight, shards, and the prefix of its ``.bin``, or None."""

    fingerprint: str
    recipe: dict[str, object]
    sources: dict[str, SourceReport]
    data_sets: list[dict[str, object]]
    examples: dict[str, list[dict[str, object]]]


def make_report(recipe: Recipe, work: Path, data_sets: Sequence[DataSet], prefixes: dict[str, str]) -> Report:
    """Return the report of what the tasks have counted. ``prefixes``: of the written data sets, by name."""
    tally = merged((work / "told").glob("*.json"))
    sources = {}
    for source in recipe.sources:
        counts = tally.counts.get(source.name, {})
        num_bytes = tally.num_bytes.get(source.name, {})
        begin, weights = len("filter "), len("weight ")
        sources[source.name] = SourceReport(
            read=counts.get("read", 0),
            read_bytes=num_bytes.get("read", 0),
            bad={what: counts[what] for what in _BAD if what in counts},
            filtered={what[begin:]: count for what, count in sorted(counts.items()) if what.startswith("filter ")},
            masked=counts.get("masked", 0),
            exact=counts.get("exact", 0),
            near=counts.get("near", 0),
            sentences=counts.get("sentences", 0),
            sentence_bytes=num_bytes.get("sentences", 0),
            kept=counts.get("kept", 0),
            kept_bytes=num_bytes.get("kept", 0),
            weight=sum(float(what[weights:]) * n for what, n in counts.items() if what.startswith("weight ")),
        )
    sets: list[dict[str, object]] = [
        {
            "name": one.name,
            "source": one.source,
            "weight": one.weight,
            "shards": [str(path) for path in one.shards],
            "prefix": prefixes.get(one.name),
        }
        for one in data_sets
    ]
    return Report(recipe.fingerprint(), dataclasses.asdict(recipe), sources, sets, tally.examples)


def save_report(path: Path, report: Report) -> None:
    """Write a report, last of all files."""
    write_whole(path, json.dumps(dataclasses.asdict(report), indent=2) + "\n")


def load_report(path: Path) -> Report:
    """Return a report. Raises ValueError where it is missing or none of ``bytescale data clean``."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        values["sources"] = {name: SourceReport(**one) for name, one in values["sources"].items()}
        return Report(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a report of bytescale data clean ({error})") from error


def text_of(report: Report) -> str:
    """Return the report as a table and examples."""
    lines = [f"{'source':<16}{'read':>9}{'filtered':>10}{'exact':>8}{'near':>8}{'kept':>9}{'bytes':>16}{'of read':>9}"]
    for name, one in report.sources.items():
        share = one.kept_bytes / one.read_bytes if one.read_bytes else 0.0
        lines.append(
            f"{name:<16}{one.read:>9,}{sum(one.filtered.values()):>10,}{one.exact:>8,}{one.near:>8,}{one.kept:>9,}"
            f"{one.kept_bytes:>16,}{share:>9.1%}"
        )
    for name, one in report.sources.items():
        told = [f"{count:,} {what}" for what, count in {**one.bad, **one.filtered}.items()]
        told += [f"{one.masked:,} masked"] if one.masked else []
        told += [f"{one.sentences:,} lost {one.sentence_bytes:,} bytes of repeated sentences"] if one.sentences else []
        lines += [f"{name}: {', '.join(told)}"] if told else []
    for what, examples in report.examples.items():
        for one_example in examples[:1]:
            more = f" (kept {one_example['kept']}, {one_example['jaccard']})" if "kept" in one_example else ""
            lines.append(f"for example {what}: {one_example['document']}{more}: {one_example['text']}")
    for data_set in report.data_sets:
        shards = data_set["shards"]
        assert isinstance(shards, list), f"{data_set=}"
        place = data_set["prefix"] or f"{len(shards)} shards"
        lines.append(f"{data_set['name']}, weight {data_set['weight']:g}: {place}")
    return "\n".join(lines)
