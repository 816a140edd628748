"""Readers of a source's documents: JSON lines, text files, Parquet rows, and pages of WARC and WET archives."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, cast

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from bytescale_ext.data.clean.recipe import Recipe, Source, files_of, shards_of, size_of
from bytescale_ext.data.clean.repositories import joined_files, repository_files
from bytescale_ext.data.clean.tally import JSON_AS_TEXT, Tally
from bytescale_ext.data.samples.records import (
    DAMAGED,
    MOST_BYTES,
    Kind,
    column_flaw,
    is_too_long,
    is_unread_json,
    kind_of,
    opened,
    parquet_rows,
    records,
)
from bytescale_ext.data.samples.template_limits import (
    BYTES,
    MOST_EXCEEDED,
    SECONDS,
    CallError,
    LimitedFunction,
    LimitExceededError,
)
from bytescale_ext.errors import one_line
from bytescale_ext.json_input import check_characters, finite, json_value, stored_bytes

if TYPE_CHECKING:
    from warcio.recordloader import ArcWarcRecord

_TOO_LONG: Final = f"a document of more than {MOST_BYTES >> 20} MiB"
_MOST_HEADER_BYTES: Final = 1 << 20  # of a record of WARC
_MOST_PAGE_BYTES: Final = 4 << 20  # of HTML, whose text takes minutes to find in longer pages
_LONG_PAGE: Final = f"a page of more than {_MOST_PAGE_BYTES >> 20} MiB of HTML"
_COSTLY: Final = f"a page whose text takes more than {SECONDS:g} s or {BYTES >> 20:,} MiB to find"
_HTML: Final = ("text/html", "application/xhtml+xml")
_NEEDS: Final = {"parquet": ("pyarrow",), "warc": ("warcio", "trafilatura")}


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that is not a document.

    Attributes:
        kind: ``empty``, ``binary`` or ``broken``.
        where: location of the record.
        why: reason in words.
    """

    kind: str
    where: str
    why: str


type Read = Document | BadRecord


class Collect(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Yields the documents of a task's shards, and counts unreadable records. Tasks have consecutive shards.

    Raises:
        ValueError: a record is unreadable, and the recipe has ``on_bad = "fail"``.
    """

    name = "collect"
    type = "reader"

    def __init__(self, recipe: Recipe, tallies: Path) -> None:
        super().__init__()
        self.recipe = recipe
        self.tallies = tallies

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Read the files of a task in their order, so that documents are in the same order for any number of tasks."""
        tally, files = Tally(), files_of(self.recipe.sources)
        shards = shards_of([size_of(path)[0] for _, path in files])
        for shard, (number, path) in _of_task(shards, files, rank, world_size):
            source = self.recipe.sources[number]
            if source.format == "auto" and is_json_as_text(path, self.recipe.text_key):
                tally.add(source.name, JSON_AS_TEXT)
                tally.example(JSON_AS_TEXT, str(path), "its first value is no object with the key of the text")
            for record in documents_of(path, source, self.recipe.text_key):
                if isinstance(record, BadRecord):
                    self._count_unreadable(record, source, tally)
                    continue
                tally.add(source.name, "read", num_bytes=len(record.text.encode("utf-8", "surrogatepass")))
                record.metadata = {"source": source.name, "keys": record.metadata, "shard": shard}
                yield record
        tally.save(self.tallies / f"collect-{rank:05d}.json")

    def _count_unreadable(self, record: BadRecord, source: Source, tally: Tally) -> None:
        if self.recipe.on_bad == "fail":
            raise ValueError(f"{record.where}: {record.why}: fix it, or give --on-bad skip")
        tally.add(source.name, record.kind)
        tally.example(record.kind, record.where, record.why)


def _of_task(
    shards: np.ndarray, files: list[tuple[int, Path]], rank: int, world_size: int
) -> Iterator[tuple[int, tuple[int, Path]]]:
    """Yield (shard, file) of the files of a task. ``shards``: shard of each file, [files]."""
    tasks = shards * world_size // (shards[-1] + 1)
    for place in np.flatnonzero(tasks == rank).tolist():
        yield int(shards[place]), files[place]


def check_packages(recipe: Recipe) -> None:
    """Raise ValueError if a package that a source needs is not installed."""
    for source in recipe.sources:
        missing = [name for name in _NEEDS.get(source.format, ()) if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"source {source.name}: {source.format} needs {missing[0]}: pip install {missing[0]}")


def is_json_as_text(path: Path, key: str) -> bool:
    """Return whether a file that begins like JSON is read as one text."""
    try:
        return is_unread_json(path) and kind_of(path, key) == "text"
    except (*DAMAGED, ValueError):
        return False  # a broken record


def documents_of(path: Path, source: Source, key: str) -> Iterator[Read]:
    """Yield the documents and the unreadable records of a file; ``key``: key or column of the text."""
    readers: dict[str, Callable[[Path, Source, str], Iterator[Read]]] = {
        "text": _text_file,
        "jsonl": _json_lines,
        "lines": partial(_json_lines, kind="lines"),
        "values": partial(_json_lines, kind="values"),
        "parquet": _parquet_rows,
        "warc": _archived_pages,
        "repositories": _repository,
    }
    kind: str = source.format
    if kind == "auto":
        try:
            kind = kind_of(path, key)
        except (*DAMAGED, ValueError) as error:
            reason = str(error).removeprefix(f"{path}: ")
            yield BadRecord("broken", str(path), f"cannot be read ({reason})")
            return
    yield from readers[kind](path, source, key)


def _name(path: Path, source: Source) -> str:
    root = Path(source.path)
    is_below = path != root and path.is_relative_to(root)
    return f"{source.name}/{path.relative_to(root).as_posix() if is_below else path.name}"


def _text_file(path: Path, source: Source, _: str) -> Iterator[Read]:
    try:
        is_long = is_too_long(path)
        with opened(path) as stream:
            raw = b"" if is_long else stream.read()
    except (*DAMAGED, ValueError) as error:
        yield BadRecord("broken", str(path), f"cannot be read ({_reason(error, path)})")
        return
    yield BadRecord("broken", str(path), _TOO_LONG) if is_long else _document(raw, str(path), _name(path, source))


def _reason(error: Exception, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ")


def _repository(path: Path, source: Source, _: str) -> Iterator[Read]:
    """Yield a document of all files of a repository, and the files that are not text."""
    texts = {}
    for file in repository_files(path):
        try:
            found = _document(stored_bytes(file), str(file), file.name)
        except OSError as error:
            found = BadRecord("broken", str(file), f"cannot be read ({error.strerror})")
        if isinstance(found, Document):
            texts[file.relative_to(path).as_posix()] = found.text
        elif found.kind != "empty":
            yield found
    if texts:
        yield Document(joined_files(texts), _name(path, source))
    else:
        yield BadRecord("empty", str(path), "no code")


def _document(raw: bytes, where: str, name: str) -> Read:
    if not raw.strip():
        return BadRecord("empty", where, "no text")
    if b"\0" in raw:
        return BadRecord("binary", where, "a byte of value 0: this is not text")
    try:
        return Document(raw.decode("utf-8"), name)
    except UnicodeDecodeError as error:
        return BadRecord("binary", where, f"not UTF-8 ({error.reason} at byte {error.start})")


def _json_lines(path: Path, source: Source, key: str, kind: Kind | None = None) -> Iterator[Read]:
    """Yield the documents and unreadable records of a file of JSON; without its kind, the file tells it."""
    number, name = 0, _name(path, source)
    try:
        if kind is None:
            kind = "values" if kind_of(path, key) == "values" else "lines"
        for number, line in enumerate(records(path, kind), 1):
            if line is None:
                yield BadRecord("broken", f"{path}:{number}", _TOO_LONG)
            elif line.strip():
                yield _json_line(line, f"{path}:{number}", f"{name}#{number}", key)
    except Exception as error:  # each compression has errors of its own
        yield BadRecord("broken", f"{path}:{number + 1}", f"cannot be read any further ({_reason(error, path)})")


def _json_line(line: bytes, where: str, name: str, key: str) -> Read:
    try:
        value = json_value(line, is_strict=True)
        check_characters(line, value)
    except (ValueError, RecursionError) as error:
        return BadRecord("broken", where, f"not JSON ({error})")
    if not isinstance(value, dict) or not isinstance(value.get(key), str):
        content = ", ".join(sorted(value)) if isinstance(value, dict) else type(value).__name__
        return BadRecord("broken", where, f"no text under {key!r} (found: {content})")
    if not value[key].strip():
        return BadRecord("empty", where, "no text")
    try:
        others = finite({other: each for other, each in value.items() if other not in (key, "id")})
    except ValueError as error:
        return BadRecord("broken", where, str(error))
    return Document(value[key], str(value.get("id", name)), metadata=others)


def _parquet_rows(path: Path, source: Source, key: str) -> Iterator[Read]:
    number, num_documents, file_path, file_name = 0, 0, str(path), _name(path, source)
    try:
        if flaw := column_flaw(path, key):
            yield BadRecord("broken", str(path), flaw)
            return
        for number, row in enumerate(parquet_rows(path), 1):
            text = None if row is None else row.pop(key)
            if row is None or len(str(text)) > MOST_BYTES:
                yield BadRecord("broken", f"{file_path}, row {number}", _TOO_LONG)
                continue
            if text is None or not str(text).strip():
                yield BadRecord("empty", f"{file_path}, row {number}", "a row without text")
                continue
            num_documents += 1
            name = row.pop("id", f"{file_name}#{num_documents}")
            yield Document(str(text), str(name), metadata=row)
    except ValueError as error:
        yield BadRecord("broken", f"{path}, row {number + 1}", str(error).removeprefix(f"{path}: "))


def _archived_records(stream: IO[bytes]) -> Iterator[ArcWarcRecord]:
    """Yield the records of an unpacked WARC file, whose headers have at most ``_MOST_HEADER_BYTES`` each."""
    from warcio.archiveiterator import ArchiveIterator
    from warcio.bufferedreaders import BufferedReader

    class BoundedReader(BufferedReader):  # type: ignore[misc]  # warcio has no types
        """A reader whose lines without content between them have a limit. ``left``: bytes up to the limit."""

        left = _MOST_HEADER_BYTES

        def _fillbuff(self, block_size: int | None = None) -> None:
            try:
                super()._fillbuff(block_size)
            except EOFError:  # warcio takes it as the end of the records
                raise ValueError("it is cut short") from None

        def read(self, length: int | None = None) -> bytes:
            self.left = _MOST_HEADER_BYTES
            return cast(bytes, super().read(length))

        def readline(self, length: int | None = None) -> bytes:
            line: bytes = super().readline(min(length or self.left, self.left))
            self.left -= len(line)
            if not self.left:
                raise ValueError(f"the headers of a record have more than {_MOST_HEADER_BYTES >> 20} MiB")
            return line

    class Archive(ArchiveIterator):  # type: ignore[misc]
        INC_RECORD = ""  # no lines on standard error

    archive = Archive(stream)
    archive.reader = BoundedReader(stream)
    yield from archive


def _content(record: ArcWarcRecord) -> bytes:
    """Return the content of a record of WARC, or its first ``MOST_BYTES + 1`` bytes."""
    encoding = record.http_headers.get_header("Content-Encoding", "") if record.http_headers else ""
    if encoding.strip().lower() == "br":
        raise ValueError("its content is packed with Brotli, whose size cannot be limited")
    with contextlib.redirect_stderr(io.StringIO()):  # warcio writes about damaged packing
        return cast(bytes, record.content_stream().read(MOST_BYTES + 1))


def _with_its_text(page: Document, where: str, extract: Callable[[str], str]) -> Document | BadRecord:
    """Return a page of HTML with the text that ``extract`` finds in it."""
    try:
        page.text = extract(page.text) or ""
    except LimitExceededError:
        return BadRecord("broken", where, _COSTLY)
    except (CallError, ValueError) as error:
        return BadRecord("broken", where, f"its text cannot be found ({one_line(error, 160)})")
    return page


def _archived_pages(path: Path, source: Source, _: str) -> Iterator[Read]:
    import trafilatura  # noqa: F401  # here, so that the process of ``extract`` has it
    from datatrove.pipeline.extractors import Trafilatura

    extract, num_costly = LimitedFunction(Trafilatura().extract), 0
    try:
        with opened(path) as stream:
            for number, record in enumerate(_archived_records(stream), 1):
                if record.rec_type not in ("response", "conversion"):
                    continue
                kind = record.http_headers.get_header("Content-Type", "") if record.http_headers else "text/plain"
                is_page = kind.startswith(_HTML)
                if not is_page and not kind.startswith("text/plain"):
                    continue
                where = f"{path}, record {number}"
                try:
                    raw = _content(record)
                except ValueError as error:
                    yield BadRecord("broken", where, str(error))
                    continue
                if len(raw) > (_MOST_PAGE_BYTES if is_page else MOST_BYTES):
                    yield BadRecord("broken", where, _LONG_PAGE if is_page else _TOO_LONG)
                    continue
                page = _document(raw, where, record.rec_headers.get_header("WARC-Record-ID", where))
                if isinstance(page, Document):
                    headers = {"url": "WARC-Target-URI", "date": "WARC-Date"}
                    found = {name: record.rec_headers.get_header(header) for name, header in headers.items()}
                    page.metadata = {name: value for name, value in found.items() if value}
                if is_page and isinstance(page, Document):
                    page = _with_its_text(page, where, extract)
                is_empty = isinstance(page, Document) and not page.text
                yield BadRecord("empty", where, "a page without text") if is_empty else page
                num_costly += isinstance(page, BadRecord) and page.why == _COSTLY
                if num_costly == MOST_EXCEEDED:
                    raise ValueError(f"{num_costly} pages are too costly: nothing behind them is read")
    except Exception as error:  # warcio, gzip and the extractor raise many types
        yield BadRecord("broken", str(path), f"not a WARC file ({one_line(_reason(error, path), 300)})")
