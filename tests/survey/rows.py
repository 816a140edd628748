"""The rows of the survey: what each flag changes, on which command line, or why it changes nothing.

Each ``*.toml`` file of this folder is a list of groups. A group has these keys:

- ``flags``: one row a line: a flag, and the value that differs from the line's value.
- ``changes``: a reading (``readings.py``), "refused", "nothing", "tested" or "trained".
- ``line``: command line of ``lines.py`` to which the words of a row are added; default: "rope". For "trained", a line
  of ``trainings.py``; a row then ends with a bar and the trace that the flag leaves behind, or "no" and the trace that
  it removes.
- ``with``: further words of the line.
- ``names``: name of the setting in Megatron's refusal, if the refusal leaves the flag out.
- ``versions``: "0.20" for flags that Megatron has since that version, "before 0.20" for flags that it lost there.
- ``because``: the reason why no other reading changes; needed by "config" and "nothing". For "tested", a file of tests.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.bytescale.versions import installed_megatron

REFUSED, NOTHING, TESTED, TRAINED = "refused", "nothing", "tested", "trained"
READINGS = ("weights", "loss", "update", "schedule", "run", "config")
KINDS = (*READINGS, REFUSED, NOTHING, TESTED, TRAINED)
NEED_REASON = ("config", NOTHING, TESTED)


@dataclass(frozen=True)
class Row:
    """One flag with a value, on one command line.

    Attributes:
        words: flag and its values.
        changes: kind of the change, one of ``KINDS``.
        line: name of the command line.
        added: further words of the line.
        because: reason why no other reading changes, or file of tests.
        names: name of the setting in the refusal; empty: the flag.
        trace: text, file or figure of a training with the flag; empty for other kinds.
    """

    words: tuple[str, ...]
    changes: str
    line: str
    added: tuple[str, ...]
    because: str
    names: str
    trace: str

    @property
    def flag(self) -> str:
        """The flag."""
        return self.words[0]

    @property
    def name(self) -> str:
        """Name of the row in the output of tests."""
        return " ".join([*self.words, "on", self.line, *self.added])


def rows() -> list[Row]:
    """Return the rows of all files."""
    return [row for file in sorted(Path(__file__).parent.glob("*.toml")) for row in _rows_of(file)]


def _rows_of(file: Path) -> Iterator[Row]:
    for group in tomllib.loads(file.read_text(encoding="utf-8"))["group"]:
        unknown = set(group) - {"flags", "changes", "line", "with", "because", "names", "versions"}
        assert not unknown, (file.name, unknown)
        if not _is_installed(group.get("versions", "0")):
            continue
        assert group["changes"] in KINDS, (file.name, group["changes"])
        assert "because" in group or group["changes"] not in NEED_REASON, (file.name, group["flags"])
        for text in group["flags"].strip().splitlines():
            words, _, trace = text.partition(" | ")
            yield Row(
                tuple(words.split()),
                group["changes"],
                group.get("line", "rope"),
                tuple(group.get("with", "").split()),
                group.get("because", ""),
                group.get("names", ""),
                trace,
            )


def _is_installed(versions: str) -> bool:
    """Return whether the installed Megatron is one of the versions that a group names."""
    limit = _numbers(versions.removeprefix("before "))
    is_older = _numbers(installed_megatron() or "0") < limit
    return is_older if versions.startswith("before ") else not is_older


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
