"""Documents that ``bytescale corpus`` reads: files, folders and lines of JSONL files."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bytescale_ext.data.samples.texts import json_text
from bytescale_ext.new_file import check_writable_folder


@dataclass(frozen=True, slots=True)
class Entry:
    """Location of one document: a file, or line ``line`` of a JSONL file, which starts at byte ``offset``."""

    path: Path
    line: int | None = None
    offset: int = 0


def environment_entries(pattern: str = "*.py") -> list[Entry]:
    """Return the matching files of the running Python: first its standard library, then its packages."""
    paths = sysconfig.get_paths()
    standard = Path(paths["stdlib"])
    installed = dict.fromkeys(Path(paths[name]) for name in ("purelib", "platlib"))
    library = [e for e in folder_entries(standard, pattern) if not _in_packages(e.path.relative_to(standard))]
    return library + [entry for root in installed if root.is_dir() for entry in folder_entries(root, pattern)]


def folder_entries(root: Path, pattern: str) -> list[Entry]:
    """Return the matching files below a folder, sorted by path, without hidden files and folders.

    Raises:
        ValueError: no file matches.
    """
    try:
        found = list(root.rglob(pattern))
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"--glob {pattern!r} is no pattern for the files below a folder: {error}") from error
    matches = [
        path
        for path in found
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    if not matches:
        raise ValueError(f"{root}: no file below matches {pattern!r}: give another --glob or another folder")
    matches.sort(key=lambda path: path.relative_to(root).as_posix())
    return [entry for path in matches for entry in file_entries(path)]


def file_entries(path: Path) -> list[Entry]:
    """Return one entry for a file, or one entry per line of a ``.jsonl`` file."""
    if path.suffix != ".jsonl":
        return [Entry(path)]
    entries, offset = [], 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            entries.append(Entry(path, number, offset))
            offset += len(line)
    return entries


def source_entries(sources: Sequence[str], pattern: str) -> list[Entry]:
    """Return the documents of files and folders, in the given order.

    Raises:
        ValueError: a source does not exist, or a folder has no matching file.
    """
    entries: list[Entry] = []
    for source in map(Path, sources):
        if not source.exists():
            raise ValueError(f"{source}: no such file or folder: change --from")
        entries += folder_entries(source, pattern) if source.is_dir() else file_entries(source)
    return entries


def check_first_lines(entries: Sequence[Entry], json_key: str) -> None:
    """Raise ValueError if the first line of a JSONL file is invalid, before slow work starts."""
    for _ in contents([entry for entry in entries if entry.line == 1], json_key):
        pass


def contents(entries: Sequence[Entry], json_key: str) -> Iterator[tuple[Entry, bytes]]:
    """Yield each entry with its text. Raises ValueError for an invalid line or an unreadable file."""
    for entry, raw in raw_contents(entries):
        yield entry, raw if entry.line is None else json_text(raw, json_key, f"{entry.path}:{entry.line}")


def raw_contents(entries: Sequence[Entry]) -> Iterator[tuple[Entry, bytes]]:
    """Yield each entry with the bytes of its file or line. A JSONL file stays open from line to line."""
    opened: dict[Path, BinaryIO] = {}
    try:
        for entry in entries:
            if entry.line is None:
                yield entry, _file_bytes(entry.path)
                continue
            if entry.path not in opened:
                for stream in opened.values():
                    stream.close()
                opened = {entry.path: entry.path.open("rb")}
            opened[entry.path].seek(entry.offset)
            yield entry, opened[entry.path].readline()
    finally:
        for stream in opened.values():
            stream.close()


def _file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot read ({error.strerror}): change --from or --glob") from error


def checked_prefix(prefix: str, flag: str = "--output") -> Path:
    """Return the path of a data set. Raises ValueError, which names the flag, if it cannot be written."""
    target = Path(prefix)
    if not target.name or prefix.endswith(("/", ".bin", ".idx")):
        raise ValueError(f"{flag} {prefix}: give a path that ends in a name, without .bin or .idx")
    try:
        check_writable_folder(target.parent)
    except OSError as error:
        raise ValueError(
            f"{flag} {prefix}: cannot write to {target.parent} ({error.strerror}): change {flag}"
        ) from error
    return target


def _in_packages(path: Path) -> bool:
    return path.parts[0] in ("site-packages", "dist-packages")
