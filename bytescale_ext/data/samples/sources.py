"""Documents that ``bytescale corpus`` reads: files, folders and lines of JSONL files."""

from __future__ import annotations

import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal, cast

from bytescale_ext.data.samples.patterns import paths_below, paths_matching
from bytescale_ext.data.samples.records import (
    DAMAGED,
    Kind,
    column_flaw,
    has_mark,
    is_too_long,
    is_unread_json,
    kind_of,
    lines,
    opened,
    packing_of,
    plain_line,
    records,
    write_records,
)
from bytescale_ext.data.samples.texts import json_text
from bytescale_ext.new_file import check_writable_folder

_CHATS: Final = ("messages", "chosen")  # keys of lists


@dataclass(frozen=True, slots=True)
class Entry:
    """Location of one document: a file, or record ``line`` of a file of records.

    ``offset``: first byte of the record. In packed files and files of other kinds than lines it is a byte of the
    unpacked records; ``kind`` is the kind of such a file, "" for a file of lines. ``is_too_long``: whether the record
    has more than ``MOST_BYTES``; it is left out.
    """

    path: Path
    line: int | None = None
    offset: int = 0
    kind: Kind | Literal[""] = ""
    is_too_long: bool = False


def environment_entries(pattern: str = "*.py") -> list[Entry]:
    """Return the matching files of the running Python: first its standard library, then its packages."""
    paths = sysconfig.get_paths()
    standard = Path(paths["stdlib"])
    installed = dict.fromkeys(Path(paths[name]) for name in ("purelib", "platlib"))
    library = [e for e in folder_entries(standard, pattern) if not _in_packages(e.path.relative_to(standard))]
    return library + [entry for root in installed if root.is_dir() for entry in folder_entries(root, pattern)]


def folder_entries(root: Path, pattern: str, key: str = "text") -> list[Entry]:
    """Return the matching files below a folder, sorted by path, without hidden files and folders.

    Raises:
        ValueError: no file matches.
    """
    try:
        found = paths_below(root, pattern)
    except ValueError as error:
        raise ValueError(f"--glob {error}") from error
    matches = shown_files(found, root)
    if not matches:
        raise ValueError(f"{root}: no file below matches {pattern!r}: give another --glob or another folder")
    return [entry for path in matches for entry in file_entries(path, key)]


def shown_files(paths: Iterable[Path], root: Path) -> list[Path]:
    """Return the files among paths below a folder, sorted by path, without hidden files and folders."""
    files = (path for path in paths if path.is_file())
    shown = (path for path in files if not any(part.startswith(".") for part in path.relative_to(root).parts))
    return sorted(shown, key=lambda path: path.relative_to(root).as_posix())


def file_entries(path: Path, key: str = "text") -> list[Entry]:
    """Return one entry for a file, or one entry per record of a file of records; ``key``: key of its documents.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        kind = kind_of(path, key)
        if kind == "warc":
            raise ValueError(f"{path}: bytescale data clean reads WARC files")
        if kind == "text":
            return [Entry(path, is_too_long=is_too_long(path))]
        if kind == "parquet" and key not in _CHATS and (flaw := column_flaw(path, key)):
            raise ValueError(f"{path}: {flaw}: change --json-key")
        is_plain = kind == "lines" and not packing_of(path) and not has_mark(path)
        return _plain_lines(path) if is_plain else _unpacked_records(path, kind)
    except DAMAGED as error:
        raise ValueError(f"{path}: cannot read ({error}): change --from or --glob") from error


def _plain_lines(path: Path) -> list[Entry]:
    """Return an entry for each line of a plain file, without blank lines."""
    entries, offset = [], 0
    with path.open("rb") as stream:
        for number, line in enumerate(lines(stream), start=1):
            if line is None or line.strip():
                entries.append(Entry(path, number, offset, is_too_long=line is None))
            offset = stream.tell() if line is None else offset + len(line)
    return entries


def _unpacked_records(path: Path, kind: Kind) -> list[Entry]:
    """Return an entry for each record of a file, blank ones excepted, with its place in ``_records_file``."""
    entries, offset = [], 0
    for number, line in enumerate(records(path, kind), start=1):
        if line is None or line.strip():
            entries.append(Entry(path, number, offset, kind, is_too_long=line is None))
        offset += len(plain_line(line))
    return entries


def unread_json(entries: Sequence[Entry]) -> list[Path]:
    """Return the files that begin like JSON and are taken as text."""
    return [entry.path for entry in entries if entry.line is None and is_unread_json(entry.path)]


def source_entries(sources: Sequence[str], pattern: str, key: str = "text") -> list[Entry]:
    """Return the documents of files, folders and patterns of files, in the given order.

    Raises:
        ValueError: a source does not exist, or a folder has no matching file.
    """
    entries: list[Entry] = []
    for source in map(Path, sources):
        matches = [source] if source.exists() else paths_matching(str(source))
        if not matches:
            raise ValueError(f"{source}: no such file or folder: change --from")
        for match in matches:
            entries += folder_entries(match, pattern, key) if match.is_dir() else file_entries(match, key)
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
    """Yield each entry with the bytes of its file or record, without records that are too long.

    A file of records stays open from record to record. Records of packed files and of other kinds than lines are
    unpacked to a temporary file.
    """
    with ExitStack() as unpacked, ExitStack() as plain:
        streams: dict[Path, BinaryIO] = {}
        for entry in entries:
            if entry.is_too_long:
                continue
            if entry.line is None:
                yield entry, _file_bytes(entry.path)
                continue
            if entry.path not in streams:
                if not entry.kind:
                    plain.close()
                    streams = {path: stream for path, stream in streams.items() if not stream.closed}
                streams[entry.path] = (unpacked if entry.kind else plain).enter_context(_records_file(entry))
            streams[entry.path].seek(entry.offset)
            yield entry, streams[entry.path].readline()


def _records_file(entry: Entry) -> BinaryIO:
    """Open a file with the records of an entry's file, a line each."""
    if not entry.kind:
        return entry.path.open("rb")
    unpacked = cast(BinaryIO, tempfile.TemporaryFile())
    try:
        write_records(unpacked, tempfile.gettempdir(), entry.path, entry.kind)
    except BaseException:
        unpacked.close()
        raise
    return unpacked


def _file_bytes(path: Path) -> bytes:
    try:
        with opened(path) as stream:
            return stream.read()
    except DAMAGED as error:
        raise ValueError(
            f"{path}: cannot read ({getattr(error, 'strerror', None) or error}): change --from or --glob"
        ) from error


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
