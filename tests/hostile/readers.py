"""The readers of files that users name, each with a valid file."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import lzma
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import torch
from pyarrow import parquet

from bytescale_ext.data.clean.readers import documents_of
from bytescale_ext.data.clean.recipe import Source, read_recipe
from bytescale_ext.data.corpus.sidecar import WEIGHTS, check_weights, weights_of, write_header
from bytescale_ext.data.corpus.windows_file import WindowsHeader, load_windows, sha256_of
from bytescale_ext.data.samples.chats import conversations
from bytescale_ext.data.samples.lengths import check_indexed_dataset
from bytescale_ext.data.samples.sources import contents, file_entries
from bytescale_ext.data.samples.texts import json_text
from bytescale_ext.json_input import json_settings
from bytescale_ext.measure.cost_file import SHIPPED, read_cost
from bytescale_ext.measure.timeline import read_phases
from bytescale_ext.pickles import FileSlice, check_archive, check_pickle
from bytescale_ext.plan.experts.trace import read_trace
from bytescale_ext.plan.memory.plan_file import PlanFile
from bytescale_ext.plan.sculpt.pieces import ROW
from bytescale_ext.plan.states.tiers import NUM_VERSIONS, FileLayout
from bytescale_ext.states.page_file import MAGIC, _record_checksum, check_replaceable
from megatron.bytescale.cli.shared.lengths import cut_lengths, read_lengths
from megatron.bytescale.cli.timeline import read_plan
from megatron.bytescale.convert.config_file import raw_config
from megatron.bytescale.convert.families import family_of
from megatron.bytescale.inference.heads_folder import FORMAT, read_config, trunk_hash
from tests.plan.memory.test_step_file import MEMORY

IDX = b"MMIDIDX\0\0"


@dataclass(frozen=True)
class Reader:
    """A reader of files.

    Attributes:
        name: name of the file that it reads, in a folder of its own.
        read: function that reads the file and raises ValueError for a bad one.
        valid: content of a valid file.
        is_json: whether the content is one value of JSON.
    """

    name: str
    read: Callable[[Path], object]
    valid: bytes
    is_json: bool = False


def idx(
    lengths: list[int], bounds: list[int], version: int = 1, code: int = 8, counts: tuple[int, int] = (0, 0)
) -> bytes:
    """Return an index of Megatron's; ``counts``: other numbers of sequences and bounds for the header."""
    sequences, ends = counts if any(counts) else (len(lengths), len(bounds))
    head = IDX + version.to_bytes(8, "little") + bytes([code])
    head += sequences.to_bytes(8, "little") + ends.to_bytes(8, "little")
    starts = np.cumsum([0, *lengths])[:-1] * 2
    return (
        head + np.array(lengths, "<i4").tobytes() + starts.astype("<i8").tobytes() + np.array(bounds, "<i8").tobytes()
    )


def npy(values: object) -> bytes:
    """Return a file of ``numpy.save``."""
    file = io.BytesIO()
    np.save(file, np.asarray(values))
    return file.getvalue()


def npy_header(text: str) -> bytes:
    """Return a file of ``numpy.save`` with this header and eight bytes."""
    head = text.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + b"\0" * 8


def archive(value: object) -> bytes:
    """Return a file of ``torch.save``."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def pages(*numbers: int) -> bytes:
    """Return the beginning of a page file: step, pages, copies, bytes of a page."""
    return b"bytescale pages\x01" + b"".join(number.to_bytes(8, "little") for number in numbers) + b"\0" * 100


def read_data_set(path: Path) -> object:
    path.with_suffix(".bin").write_bytes(b"\0" * 10)
    return check_indexed_dataset(path)


def read_archive(path: Path) -> None:
    with path.open("rb") as file:
        check_archive(FileSlice(file, 0, path.stat().st_size))


def read_records(kind: str) -> Callable[[Path], object]:
    def read(path: Path) -> object:
        return list(documents_of(path, Source("docs", str(path.parent), kind, "*", ()), "text"))

    return read


def read_documents(path: Path) -> object:
    return list(contents(file_entries(path), "text"))


def read_recipe_file(path: Path) -> object:
    return read_recipe(path, [f"more={path}"], {})


def read_windows(path: Path) -> object:
    """Read a table of windows whose header has the hash of the table."""
    header = WindowsHeader(8, "none", 1, "0" * 64, sha256_of(path))
    path.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(header)))
    return load_windows(path)


def table(columns: dict[str, object]) -> bytes:
    """Return a Parquet file."""
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file, write_page_index=True)
    return file.getvalue()


def not_utf8() -> pyarrow.Array:
    """Return a column of text whose second value is not UTF-8."""
    return pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"one", b"\xff\xfe"]).buffers())


def page_file() -> bytes:
    """Return a complete page file."""
    record = bytearray(pages(1, 1, 1, 4096).ljust(FileLayout(1, 1, 4096).record_bytes, b"\0"))
    record[len(MAGIC) + 32 : len(MAGIC) + 36] = _record_checksum(bytes(record)).to_bytes(4, "little")
    return bytes(record) * NUM_VERSIONS


def warc() -> bytes:
    body = b"A harbour is a part of a body of water that is deep enough for ships to anchor.\n"
    head = f"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body + b"\r\n\r\n"


def weighed(folder: Path) -> str:
    """Write a data set of two documents, five tokens and their weights; return its prefix."""
    prefix = str(folder / "w")
    Path(prefix + ".idx").write_bytes(idx([2, 3], [0, 1, 2]))
    Path(prefix + ".bin").write_bytes(b"\0" * 10)
    Path(weights_of(prefix) + ".bin").write_bytes(b"\0\1\1\0\1")
    return prefix


def weights_header() -> bytes:
    """Return the header of these weights."""
    with tempfile.TemporaryDirectory() as folder:
        write_header(weights_of(weighed(Path(folder))), str(Path(folder) / "w"), WEIGHTS, "uint8")
        return Path(folder, "w.weights.json").read_bytes()


def read_weights(path: Path) -> object:
    return check_weights(weighed(path.parent))


def read_model_config(path: Path) -> object:
    return family_of(raw_config(path.parent))


LLAMA = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
TRUNK = {"num_layers": 2, "hidden_size": 8}
HEADS = {
    "format": FORMAT, "heads": {"kind": "medusa", "num_heads": 1, "num_layers": 0, "decay": 0.8}, "trunk": TRUNK,
    "trunk_hash": trunk_hash(TRUNK), "tensors": {},
}  # fmt: skip
PLAN = {"num_ranks": 1, "tokens_per_rank": 8, "lengths": [8],
        "ranks": [[{"shards": [{"seq": 0, "ranges": [[0, 8]], "ring": [0]}]}]]}  # fmt: skip
PHASE = {"step": 1, "rank": 0, "kind": "forward", "start": 0.0, "stop": 1.0, "micro_batch": 0}
TRACE = b'{"experts": 2, "topk": 1, "ranks": 1}\n{"loads": {"1": [[3, 4]]}}\n'
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
READERS = {
    "cost": Reader("cost.json", read_cost, sorted(SHIPPED.glob("*.json"))[0].read_bytes(), is_json=True),
    "plan": Reader("plan.json", read_plan, json.dumps(PLAN).encode(), is_json=True),
    "memory plan": Reader(
        "memory.json", lambda path: PlanFile.from_json(json_settings(path.read_bytes())),
        json.dumps(MEMORY.to_json()).encode(), is_json=True,
    ),
    "phases": Reader("rank0.jsonl", lambda path: read_phases(path.parent), json.dumps(PHASE).encode(), is_json=True),
    "trace": Reader("trace.jsonl", read_trace, TRACE, is_json=True),
    "chat": Reader(
        "chat.jsonl", lambda path: conversations(path.read_bytes(), "chat.jsonl:1"), json.dumps(CHAT).encode(),
        is_json=True,
    ),
    "text": Reader("a.jsonl", lambda path: json_text(path.read_bytes(), "text", "a.jsonl:1"), b'{"text": "x"}', True),
    "records": Reader("b.jsonl", read_records("jsonl"), b'{"text": "x"}\n{"text": "y"}\n'),
    "packed records": Reader("b.jsonl.gz", read_records("jsonl"), gzip.compress(b'{"text": "x"}\n' * 9, mtime=0)),
    "warc": Reader("c.warc", read_records("warc"), warc()),
    "heads": Reader("config.json", lambda path: read_config(path.parent), json.dumps(HEADS).encode(), is_json=True),
    "model config": Reader("config.json", read_model_config, json.dumps(LLAMA).encode(), is_json=True),
    "index": Reader("data.idx", read_data_set, idx([2, 3], [0, 1, 2])),
    "lengths": Reader("lengths.npy", lambda path: cut_lengths(read_lengths(path), 64), npy([3, 70, 5])),
    "windows": Reader("a.windows.npy", read_windows, npy(np.array([(0, 0, 0, 3), (0, 1, 0, 5)], ROW))),
    "weights": Reader("w.weights.json", read_weights, weights_header(), is_json=True),
    "pages": Reader("rank.pages", check_replaceable, page_file()),
    "parquet": Reader("d.parquet", read_documents, table({"text": ["one", "two"], "stars": [1, 2]})),
    "list": Reader("e.json", read_documents, b'[{"text": "x"}, {"text": "y"}]'),
    "recipe": Reader("r.toml", read_recipe_file, b"[[source]]\nname = 'docs'\npath = 'r.toml'\n"),
    "packed list": Reader("e.json.xz", read_documents, lzma.compress(b'[{"text": "x"}, {"text": "y"}]')),
    "pickle": Reader("x.pickle", lambda path: check_pickle(path.read_bytes()), b"\x80\x04K\x01."),
    "archive": Reader("x.pt", read_archive, archive({"weight": torch.arange(3), "name": "x"})),
}  # fmt: skip


def outcome(reader: Reader, folder: Path, content: bytes) -> str:
    """Return the message of a reader's refusal of a content, or "read"."""
    path = folder / reader.name
    path.write_bytes(content)
    try:
        reader.read(path)
    except (ValueError, OSError) as error:
        return str(error)
    return "read"
