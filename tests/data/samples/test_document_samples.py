"""Samples that are found in a mapped index, against the table of all samples, and the files of their scans."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.data.samples import document_samples, lengths, scan_files
from bytescale_ext.data.samples.document_samples import DocumentSamples, open_samples
from bytescale_ext.data.samples.lengths import SampleTable, check_indexed_dataset, read_idx_lengths, sample_table
from tests.data.sources import write_data_set
from tests.sample import examples


def _places(samples: DocumentSamples | SampleTable) -> list[tuple[int, int, int]]:
    return [samples.place(row) for row in range(len(samples))]


def _documents(counts: list[int], splits: list[int]) -> list[list[list[int]]]:
    """Return documents of these numbers of tokens; every other document is split into sequences."""
    documents = []
    for number, count in enumerate(counts):
        sizes = [count] if number % 2 or not splits else np.diff([0, *sorted(s % (count + 1) for s in splits), count])
        documents.append([[1] * int(size) for size in sizes])
    return documents


@settings(max_examples=examples(100), deadline=None)
@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=25),
    splits=st.lists(st.integers(0, 20), max_size=2),
    seq_length=st.integers(1, 12),
    bounds=st.tuples(st.integers(0, 25), st.integers(0, 25)),
)
def test_samples_are_those_of_a_table(
    counts: list[int],
    splits: list[int],
    seq_length: int,
    bounds: tuple[int, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    prefix = write_data_set(tmp_path_factory.mktemp("data") / "a", _documents([*counts, 5], splits))
    whole = open_samples(prefix, seq_length)
    begin, end = sorted(min(bound, len(counts)) for bound in bounds)
    for samples, part in ((whole, [*counts, 5]), (whole.part(begin, end), counts[begin:end])):
        table = sample_table(np.array(part, dtype=np.int64), seq_length)
        assert len(samples) == len(table)
        assert samples.num_empty == table.num_empty
        assert samples.num_tokens == table.num_tokens
        places = _places(samples)
        assert sorted(places) == _places(table)
        assert samples.lengths(np.arange(len(samples))).tolist() == [length for _, _, length in places]
    cut = np.minimum([count for count in [*counts, 5] if count], seq_length)
    assert whole.mean_tokens_of_first == pytest.approx(cut.mean())


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set whose scans are written to files."""
    monkeypatch.setattr(scan_files, "FILE_LIMIT", 0)
    return write_data_set(tmp_path / "a", _documents([3, 0, 10, 4, 9, 0, 1, 30], []))


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The scans of this process, by name."""
    names: list[str] = []
    for module, name in ((document_samples, "_scan"), (lengths, "_sizes")):

        def scan(*args: object, original: object = getattr(module, name), name: str = name) -> np.ndarray:
            names.append(name)
            return original(*args)  # type: ignore[operator]

        monkeypatch.setattr(module, name, scan)
    return names


def test_an_index_is_scanned_once(prefix: str, scans: list[str]) -> None:
    places = _places(open_samples(prefix, 4))
    assert _places(open_samples(prefix, 4)) == places
    assert scans == ["_sizes", "_scan"]
    open_samples(prefix, 5)
    assert scans == ["_sizes", "_scan", "_scan"]
    assert {path.name for path in Path(prefix, "cache", "bytescale").iterdir()} == {
        "documents.npy",
        "samples-4.npy",
        "samples-5.npy",
    }


def test_waiting_threads_read_the_file_of_the_first(prefix: str, scans: list[str]) -> None:
    threads = [threading.Thread(target=open_samples, args=(prefix, 4)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scans == ["_sizes", "_scan"]


def test_files_go_to_the_folder_of_the_cache(prefix: str, tmp_path: Path, scans: list[str]) -> None:
    for _ in range(2):
        open_samples(prefix, 4, tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("bytescale-*.npy"))) == 2
    assert scans == ["_sizes", "_scan"]
    assert not Path(prefix).exists()


def test_without_a_folder_every_process_scans(prefix: str, scans: list[str]) -> None:
    Path(prefix).write_text("a file in the place of the folder")
    assert len(open_samples(prefix, 4)) == len(open_samples(prefix, 4))
    assert scans == ["_sizes", "_scan"] * 2


def test_another_index_is_scanned_again(prefix: str, scans: list[str]) -> None:
    open_samples(prefix, 4)
    write_data_set(Path(prefix), _documents([3, 0, 10, 4, 9, 0, 30, 1], []))
    os.utime(prefix + ".idx", ns=(0, 1))
    assert len(open_samples(prefix, 4)) == len(sample_table(read_idx_lengths(prefix), 4))
    assert scans == ["_sizes", "_scan"] * 2


@pytest.mark.parametrize("damage", ["cut", "pickle", "huge", "order", "document", "pieces", "missing long", "counts"])
def test_a_damaged_file_is_made_again(prefix: str, damage: str, scans: list[str]) -> None:
    expected = _places(open_samples(prefix, 4))
    path = Path(prefix, "cache", "bytescale", "samples-4.npy")
    values = np.load(path)
    head, gaps, long = 5, 2, 3
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "pickle":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    elif damage == "counts":
        values[3] = 2**60
    elif damage == "huge":
        values[head + gaps] = 2**40
    elif damage == "order":
        values[head + gaps : head + gaps + 2] = values[head + gaps : head + gaps + 2][::-1].copy()
    elif damage == "document":
        values[head] += 1
    elif damage == "pieces":
        values[head + gaps + long + 1] += 1
    elif damage == "missing long":
        values = np.delete(values, [head + gaps, len(values) - 1])
    if damage not in ("cut", "pickle"):
        np.save(path, values)
    assert _places(open_samples(prefix, 4)) == expected
    assert scans == ["_sizes", "_scan", "_scan"]


def test_the_ends_of_long_lists_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_samples, "PART", 10)
    assert document_samples._checked_starts(0) == []
    assert document_samples._checked_starts(7) == [0]
    assert document_samples._checked_starts(30) == [0, 10, 20]
    assert document_samples._checked_starts(99) == [0, 40, 90]


def test_a_damaged_index_is_no_file(prefix: str) -> None:
    raw = Path(prefix + ".idx").read_bytes()
    Path(prefix + ".idx").write_bytes(raw[:34] + b"\xff\xff\xff\xff" + raw[38:])
    with pytest.raises(ValueError, match="a sequence has -1 tokens"):
        open_samples(prefix, 4)
    assert not list(Path(prefix).rglob("*.npy"))


def test_a_changed_token_file_is_refused_although_the_index_was_scanned(prefix: str) -> None:
    check_indexed_dataset(prefix)
    Path(prefix + ".bin").write_bytes(b"")
    with pytest.raises(ValueError, match="0 bytes, but"):
        check_indexed_dataset(prefix)


MEASURE = """
import sys
import numpy as np
from pathlib import Path
from bytescale_ext.data.samples.document_samples import open_samples
from bytescale_ext.data.samples.epochs import sample_order

def own_kilobytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

before = own_kilobytes()
samples = open_samples(sys.argv[1], 64).part(0, 2_900_000)
order = sample_order(len(samples), 1, 0)
for step in range(3):
    assert samples.lengths(order.rows(np.arange(10_000) + 10_000 * step)).max() == 64
print(own_kilobytes() - before, len(samples))
"""


@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's figures of memory")
def test_a_process_that_maps_a_scanned_index_keeps_nothing_of_it(tmp_path: Path) -> None:
    """A table of these samples takes 58 MB, an epoch's shuffled array 12 MB."""
    prefix, num_documents = tmp_path / "a", 3_000_000
    sizes = np.ones(num_documents, dtype="<i4")
    sizes[::5] = 100
    ends = np.cumsum(sizes, dtype="<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, num_documents, num_documents + 1)
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(header)
        for values in (sizes, (ends - sizes) * 2, np.arange(num_documents + 1, dtype="<i8")):
            values.tofile(file)
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(2 * int(ends[-1]))
    compiled = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # compiling a module takes 10 MB
    for _ in range(2):  # the first process scans, and compiles
        command = [sys.executable, "-c", MEASURE, str(prefix)]
        answer = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, timeout=300, env=compiled
        ).stdout
    own_kilobytes, num_samples = map(int, answer.split())
    assert num_samples == 2_900_000 + 580_000
    assert own_kilobytes < 10_000
