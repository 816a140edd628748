"""Hostile files of every kind: each ends in one line, in bounded time and memory."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import os
import pickle
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from bytescale_ext.errors import LONGEST
from bytescale_ext.json_input import check_stored, printable
from bytescale_ext.plan.sculpt.pieces import ROW
from tests.hostile.readers import (
    LLAMA,
    PHASE,
    PLAN,
    READERS,
    archive,
    idx,
    not_utf8,
    npy,
    npy_header,
    outcome,
    pages,
    table,
)

SECONDS, BYTES = 20.0, 2 << 30
DEEP = b"[" * 100_000
# Not the JSON of any file: content, and text in each refusal.
JSON = [
    (b"", "."), (b" \n", "."), (b"{", "."), (b"[]", "."), (b"null", "."), (b"5", "."), (b'"text"', "."), (b"true", "."),
    (DEEP, "."), (b'{"a":' * 50_000, "."), (b"\xff\xfe{}", "."), (b'{"a": ' + b"9" * 5_000 + b"}", "."),
    (b'{"a": 1e999}', "."), (b'{"a": NaN}', "."), (b'{"a": -Infinity}', "."), (b"{}\0", "."), (b"[{}, {}]", "."),
    (b'{"ranks": 1e300}', "."),
]  # fmt: skip


def numbered(value: dict[str, object], **changes: object) -> bytes:
    return json.dumps({**value, **changes}).encode()


def cost(**changes: object) -> bytes:
    return numbered(json.loads(READERS["cost"].valid), **changes)


def cost_of(part: str, **changes: object) -> bytes:
    value = json.loads(READERS["cost"].valid)
    return numbered(value, **{part: {**value[part], **changes}})


WEIGHTS = json.loads(READERS["weights"].valid)
TABLE: list[tuple[str, bytes, str]] = [
    *((name, content, text) for name, reader in READERS.items() if reader.is_json for content, text in JSON
      if content.strip() or name not in ("chat", "text")),  # they skip blank lines
    *(("cost", cost_of("forward", a=number), "forward.a|larger|must be") for number in
      (10**300, 1e308, 1e16, -1, True, "1", None, [1], {}, 2**64)),
    *(("cost", cost_of("shape", num_layers=number), "num_layers|larger") for number in
      (True, 0, -1, 1 << 41, 1.5, "2", None, 10**30)),
    *(("cost", content, ".") for content in (cost().decode().encode("utf-16"), cost() * 2)),
    ("cost", cost(tensor_parallel=True), "tensor_parallel is true"),
    ("cost", cost(source=5), "source is 5; it must be text"),
    ("cost", cost(more=1), "unknown entry more"),
    *(("plan", numbered(PLAN, num_ranks=number), "broken plan|not the output") for number in
      (0, -1, 1 << 50, 10**300, "x", None, [], 1e300)),
    *(("plan", numbered(PLAN, lengths=[number]), "broken plan|not the output") for number in
      (0, -1, 1 << 62, "x", None, [], 10**30)),
    *(("plan", numbered(PLAN, **change), "(true|1.5|\"8\") is not a whole number") for change in
      ({"num_ranks": True}, {"lengths": [True]}, {"tokens_per_rank": 1.5}, {"lengths": ["8"]})),
    *(("plan", numbered(PLAN, ranks=[[{"shards": [{"seq": 0, "ranges": [[0, 8]], "ring": [0], **change}]}]]),
       "broken plan|not the output|not a whole") for change in
      ({"ring": [0, 0]}, {"ring": [-1]}, {"seq": -1}, {"ranges": [[8, 0]]}, {"ranges": [[0, 8.5]]},
       {"ranges": [[0, 1 << 62]]}, {"ranges": [[0, 8], [0, 8]]}, {"ranges": 5})),
    ("plan", numbered(PLAN, lengths=[2**63]), "more than 64 bits"),
    *(("plan", numbered(PLAN, ranks=ranks), "broken plan|not the output") for ranks in
      ([], [[]], [5], {}, None, "x", [[{}]], [[{"shards": 5}]])),
    *(("phases", numbered(PHASE, **{name: number}), "is not a phase|is a phase of") for name in
      ("step", "rank", "start", "stop") for number in (None, "x", [], 10**30)),
    *(("phases", numbered(PHASE, **{name: True}), "true is not a") for name in
      ("step", "rank", "start", "micro_batch")),
    ("phases", numbered(PHASE, kind="\x1b[31m"), "is not a phase"),
    ("phases", numbered(PHASE, shards=[{"tokens": -1}]), "is not a phase"),
    *(("trace", json.dumps({"experts": 4, "topk": 1, "ranks": ranks}).encode() + b'\n{"loads": {"1": [[1]]}}', "trace")
      for ranks in (0, -1, True, "x", 10**300)),
    ("trace", json.dumps({"experts": 1 << 62, "topk": 1, "ranks": 1 << 62}).encode() + b'\n{"loads": {"1": [[1]]}}',
     "the loads of each layer must be"),
    *(("weights", numbered(WEIGHTS, **{name: value}), "not the header of a sidecar") for name, value in
      (("num_values", True), ("num_values", 5.0), ("num_values", "5"), ("num_nonzero", "x"), ("num_nonzero", -1),
       ("num_nonzero", None), ("num_nonzero", 6), ("version", "3"), ("version", 3.0), ("more", 1))),
    *(("weights", numbered(WEIGHTS, **{name: value}), "another data set|not match|numbers are") for name, value in
      (("num_values", 2**62), ("num_nonzero", 2), ("values_sha256", None), ("data_sha256", 5), ("dtype", "object"),
       ("dtype", ["uint8"]), ("dtype", "float32"), ("kind", "\x1b[31m"))),
    ("index", b"", "not an index"), ("index", b"MMIDIDX\0\0", "cut short"), ("index", b"x" * 100, "not an index"),
    ("index", idx([2, 3], [0, 1, 2], version=2), "version 2"), ("index", idx([2, 3], [0, 1, 2], code=0), "type 0"),
    ("index", idx([2, 3], [0, 1, 2], code=7), "type 7"), ("index", idx([2, 3], [0, 1, 2], code=255), "type 255"),
    ("index", idx([2, 3], [0, 2, 1]), "out of order"), ("index", idx([2, 3], [1, 2]), "out of order"),
    ("index", idx([2, 3], []), "end at sequence None"), ("index", idx([2, 3], [0, -1, 2]), "out of order"),
    ("index", idx([2, 3], [0, 2**63 - 1, -2**63, 2]), "out of order"),
    ("index", idx([2, 3], [0, 1, 3]), "end at sequence 3"),
    ("index", idx([2, -3], [0, 1, 2]), "-3 tokens"), ("index", idx([0, 0], [0, 1, 2]), "no tokens"),
    ("index", idx([2, 4], [0, 1, 2]), "bytes, but"), ("index", idx([2**31 - 1] * 2, [0, 1, 2]), "bytes, but"),
    *(("index", idx([2, 3], [0, 1, 2], counts=counts), "cut short") for counts in
      ((4 * 10**15, 3), (2**64 - 1, 3), (2, 2**63), (2**60, 2**60), (3, 3))),
    ("index", idx([2, 3], [0, 1, 2])[:-1], "cut short"),
    ("lengths", b"", "not a numpy array"), ("lengths", npy([]), "."), ("lengths", npy(5), "one-dimensional"),
    ("lengths", npy([[1]]), "one-dimensional"), ("lengths", npy([1.5]), "of integers"),
    ("lengths", npy(["x"]), "of integers"), ("lengths", npy([0]), "at least 1"), ("lengths", npy([-5]), "at least 1"),
    ("lengths", npy([1 << 40]), r"more than 2\^31"), ("lengths", npy([2**63]), r"more than 2\^31"),
    ("lengths", npy([2**31 - 1] * 9), "more than 50,000,000 pieces"),
    ("lengths", npy(np.array([{}], dtype=object)), "not a numpy array"),
    *(("lengths", npy_header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"), "not a numpy|holds")
      for descr, shape in (("'<i8'", f"({2**60},)"), ("'<i8'", f"({2**70},)"), ("'<i8'", "(-1,)"), ("'<i8'", "(1,2)"),
                           ("'O'", "(1,)"), ("'|V0'", "(9,)"), ("'x'", "(1,)"), ("5", "(1,)"), ("'<i8'", "'x'"))),
    *(("lengths", content, "not a numpy|of integers|holds") for content in
      (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"{" * 99, b"\x93NUMPY\x03\x00\x09\x00\x00\x00{'a':'\xff'}",
       npy(np.zeros(3, [("a", "i8")])), npy(np.zeros(3, complex)), npy(np.zeros(3, "M8[s]")), npy(np.zeros(3, "V8")),
       npy_header("{'descr':'<i8','fortran_order':False,'shape':(9**9**9,)}"))),
    ("lengths", npy_header("(" * 100), "not a numpy array"), ("lengths", npy_header("__import__('os')"), "not a numpy"),
    ("lengths", npy([1, 2])[:-1], "not a numpy array"),
    *(("windows", content, "not a table of windows") for content in
      (b"", b"x", npy([1]), npy([[1]]), npy(np.zeros(0, ROW)), npy(np.zeros((1, 1), ROW)), npy_header("(" * 100),
       READERS["windows"].valid[:-1], npy(np.array([{}], dtype=object)),
       npy_header(f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({2**60},)}}"))),
    *(("parquet", table({"text": column}), f"the column 'text' is of type {kind}.*, not text") for column, kind in
      (([1], "int64"), ([1.5], "double"), ([True], "bool"), ([b"x"], "binary"), ([["x"]], "list"), ([None], "null"),
       ([{"a": 1}], "struct"), ([datetime.date(2024, 1, 1)], "date32"), ([decimal.Decimal(1)], "decimal"))),
    ("parquet", table({"text": not_utf8()}), "d.parquet: cannot be read any further .*utf-8"),
    ("parquet", table({"body": ["x"]}), "no column 'text' .found: body"),
    ("parquet", table({"text": [None, "x"]}), ":1: no"),
    ("parquet", table({f"column {number}": ["x"] for number in range(999)}), "no column 'text' .found: column 0"),
    *(("parquet", content, "d.parquet: not a Parquet file") for content in
      (b"PAR1", b"PAR1PAR1", b"PAR1" + b"\xff" * 8 + b"PAR1", b"no table", b"PAR1" + b"\0" * 60,
       READERS["parquet"].valid[:-1], READERS["parquet"].valid[:40],
       READERS["parquet"].valid[:-8] + b"\xff\xff\xff\x7fPAR1")),
    ("parquet", b"PAR1" + b"\xff" * 40 + READERS["parquet"].valid[44:], "cannot be read any further"),
    *(("list", content, "e.json:2: not JSON|e.json:1: not JSON") for content in
      (b'[{"text": "x"}', b'[{"text": "x"}, {"text"', b'[{"text": "x"}, ' + DEEP, b'[{"text": "x"}, NaN]',
       b'[{"text": "x"}] more',
       b'[{"text": "x"}, bad, {"text": "y"}]', b'[{"text": "x"}, {"text": "\xff', b'[{"text": "x"}\0')),
    *(("list", b'[{"text": "x"}, ' + content, "no text under") for content in
      (b"5]", b'{"text": 5}]', b"null]", b"[[]]]")),
    *(("recipe", content, "not a recipe in TOML") for content in
      (b"a = " + DEEP, b"a = " + b"9" * 5_000, b"\xff", b"{}", b"a = ", b"a = 1\na = 2", b"\0", b"a" * 9)),
    *(("recipe", content, ".") for content in
      (b"step = 'x'", b"[[step]]\nuse = 'os'", b"[[step]]\nuse = 5", b"tasks = true", b"jaccard = nan",
       b"jaccard = inf", b"filters = ['x']", b"text_key = 5", b"weight_key = [1]", b"tasks = 99999999999999999999",
       b"a = 1979-05-27", b"max_weight = 1e308", b"[filters]\nx = {}")),
    *(("packed list", content, "cannot read|packed twice") for content in
      (READERS["packed list"].valid[:-9], READERS["packed list"].valid[:30], b"\xfd7zXZ\x00" + b"\xff" * 30,
       gzip.compress(READERS["packed list"].valid, mtime=0), b"BZh9" + b"\0" * 30, b"\x1f\x8b" + b"\0" * 30)),
    ("model config", numbered(LLAMA, eos_token_id=[1] * 400_000), "config.json: 1,200,... characters; a conf"),
    ("pages", b"x", "not a page file"), ("pages", b"bytescale pages\x01", "not a page file"),
    *(("pages", pages(*numbers), "cut short or damaged") for numbers in
      ((1, 2**60, 1, 4096), (1, 1, 2**60, 4096), (1, 2**34, 1, 1), (1, 2**62, 2**62, 2**62), (1, 1, 1, 4096))),
    *(("pickle", content, "^damaged") for content in
      (b"", b"\x80", b"\x80\x04", b"\x80\xff.", b"N", b"\x80\x04N", b"garbage",
       b"\x80\x04\x95" + b"\xff" * 8 + b".",
       b"\x80\x04B\xff\xff\xff\xff.", b"I" + b"9" * 5000 + b"\n.", b"t.", b"a.", b"0.", b"2.", b"g5\n.", b"h\x05.",
       b"\x80\x04r\xff\xff\xff\x7f.",
       b"Pid\n", b"(lp0\n", b"F1e999x\n.", b"S'x\n.", b"Vx", b"\x8a\xff", b"\x8b\xff\xff\xff\x7f.")),
    *(("pickle", f"c{module}\n{name}\n.".encode(), f"^{module}.{name}$") for module, name in
      (("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("subprocess", "Popen"),
       ("importlib", "import_module"), ("functools", "partial"), ("operator", "attrgetter"), ("torch", "load"),
       ("torch.storage", "_load_from_bytes"), ("numpy", "load"), ("pickle", "loads"), ("types", "CodeType"),
       ("types", "FunctionType"), ("runpy", "run_path"), ("pathlib", "Path.write_text"), ("torch.jit", "load"),
       ("timeit", "timeit"), ("code", "interact"), ("pydoc", "locate"), ("webbrowser", "open"), ("shutil", "rmtree"))),
    ("pickle", b"c__builtin__\neval\n.", "^builtins.eval$"), ("pickle", b"(ios\nsystem\n.", "^os.system$"),
    ("pickle", pickle.dumps(Path.home), "."), ("pickle", pickle.dumps(pytest.raises), "."),
    ("archive", b"", "damaged, or older"), ("archive", b"PK\x03\x04", "damaged"), ("archive", pickle.dumps(5), "older"),
    ("archive", archive([1])[:-1], "damaged"), ("archive", archive([1])[:50], "damaged"),
    ("archive", archive(torch.nn.Linear(1, 1)), "^torch.nn.modules.linear.Linear$"),
    ("archive", archive(print), "^builtins.print$"),
    *(("text", content, "not JSON|no text|a chat") for content in
      (b'{"text": 5}', b'{"text": null}', b'{"messages": []}', numbered(dict.fromkeys(map(str, range(9_999)))))),
    *(("chat", content, "chat.jsonl:1") for content in
      (b'{"messages": 5}', b'{"messages": [5]}', b'{"messages": [{"role": 5, "content": "x"}]}',
       b'{"messages": [{"role": "user"}]}', b'{"messages": [{"role": "\\u001b[0m", "content": "x"}]}')),
]  # fmt: skip


def test_the_table_is_long() -> None:
    assert len(TABLE) >= 200


@pytest.mark.parametrize("name", READERS)
def test_each_file_ends_in_one_line(name: str, tmp_path: Path) -> None:
    import re

    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    broken = []
    for number, (reader, content, text) in enumerate(TABLE):
        if reader != name:
            continue
        message = outcome(READERS[name], tmp_path, content)
        if message == "read" or "\n" in message or len(message) > LONGEST or not re.search(text, message):
            broken.append(f"row {number} ({content[:60]!r}): {message[:LONGEST]!r}, not {text!r}")
    assert not broken, "\n".join(broken)
    assert time.process_time() - begun < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < BYTES >> 10


UNPACKED = ("chat", "text", "pickle", "memory plan", "windows")
PARTLY_READ = ("records", "packed records", "warc", "pages", "archive", "lengths", "windows")
"""Readers that yield broken records, or that read only what the file's header names."""


@pytest.mark.parametrize("name", READERS)
def test_files_with_holes_are_not_read(name: str, tmp_path: Path) -> None:
    """A file of 64 GiB that takes a page of the disk ends in one line before it is read."""
    kept = READERS[name].valid
    path = tmp_path / READERS[name].name
    path.write_bytes(kept)
    os.truncate(path, 64 << 30)
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        if name in UNPACKED:  # they read the file's bytes themselves, or only what its header names
            check_stored(path)
        else:
            READERS[name].read(path)
        message = "read"
    except (ValueError, OSError) as error:
        message = str(error)
    assert "\n" not in message
    assert message != "read" or name in PARTLY_READ
    assert time.process_time() - begun < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < BYTES >> 10


@pytest.mark.parametrize("name", READERS)
def test_valid_files_are_read(name: str, tmp_path: Path) -> None:
    assert outcome(READERS[name], tmp_path, READERS[name].valid) == "read"


@pytest.mark.parametrize(
    "rank", ["9" * 9, "9" * 30, "00", "1"], ids=["a number", "a large number", "zeros", "a rank is missing"]
)
def test_names_of_ranks(rank: str, tmp_path: Path) -> None:
    if rank != "00":
        (tmp_path / f"rank{rank}.jsonl").write_bytes(READERS["phases"].valid)
    assert "rank" in outcome(READERS["phases"], tmp_path, b"{}")


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\rb", "a\x07", "a\x9bb", "\u202eevil", "a\x00b"])
def test_control_characters_are_escaped(name: str) -> None:
    assert printable(name).isprintable()
    assert printable("proj x's $(id) `é`") == "proj x's $(id) `é`"
