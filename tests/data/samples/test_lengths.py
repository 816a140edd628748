"""Lengths, checks and samples from ``.idx`` files."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.data.samples.idx_file import open_index
from bytescale_ext.data.samples.lengths import check_indexed_dataset, check_token_ids, read_idx_lengths, sample_table
from tests.data.sources import write_data_set
from tests.sample import examples

DOCUMENTS = [[[1, 2, 3]], [], [[4], [5, 6]], [[]], [[7, 8, 9, 10]]]


def test_lengths_of_documents_of_several_sequences_and_of_none(tmp_path: Path) -> None:
    prefix = write_data_set(tmp_path / "a", DOCUMENTS)
    assert read_idx_lengths(prefix).tolist() == [3, 0, 3, 0, 4]
    assert read_idx_lengths(Path(prefix + ".idx")).tolist() == [3, 0, 3, 0, 4]
    assert read_idx_lengths(prefix).dtype == np.int64


def test_parts_of_an_index_are_read_alone(tmp_path: Path) -> None:
    index = open_index(write_data_set(tmp_path / "a", DOCUMENTS))
    assert index.first_tokens(np.arange(6)).tolist() == [0, 3, 3, 6, 6, 10]
    for begin in range(6):
        for end in range(begin, 6):
            assert index.part_lengths(begin, end).tolist() == [3, 0, 3, 0, 4][begin:end]


def _damage(prefix: Path, kind: str) -> None:
    idx, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    raw = idx.read_bytes()
    if kind == "no idx":
        idx.unlink()
    elif kind == "no bin":
        data.unlink()
    elif kind == "foreign":
        idx.write_bytes(b"PK\x03\x04" + raw)
    elif kind == "empty file":
        idx.write_bytes(b"")
    elif kind == "header cut":
        idx.write_bytes(raw[:20])
    elif kind == "idx cut":
        idx.write_bytes(raw[:-1])
    elif kind == "version":
        idx.write_bytes(raw[:9] + b"\x02" + raw[10:])
    elif kind == "float":
        idx.write_bytes(raw[:17] + b"\x07" + raw[18:])
    elif kind == "bin cut":
        data.write_bytes(data.read_bytes()[:-2])
    elif kind == "bin long":
        data.write_bytes(data.read_bytes() + b"\0")
    elif kind == "document bounds":
        idx.write_bytes(raw[:-8] + (7).to_bytes(8, "little"))
    elif kind == "negative length":
        idx.write_bytes(raw[:34] + b"\xff\xff\xff\xff" + raw[38:])
    elif kind == "pointers":
        at = 34 + 5 * 4 + 8
        idx.write_bytes(raw[:at] + (2).to_bytes(8, "little") + raw[at + 8 :])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no idx", r"a\.idx: no such file"),
        ("no bin", r"a\.bin: no such file"),
        ("foreign", r"not an index file .*PK"),
        ("empty file", "not an index file"),
        ("header cut", "cut short, 20 bytes"),
        ("idx cut", r"cut short, \d+ of \d+ bytes for 5 sequences"),
        ("version", "index version 2"),
        ("float", "token type 7"),
        ("bin cut", r"18 bytes, but .* 10 tokens of uint16 \(20 bytes\)"),
        ("bin long", "21 bytes, but"),
        ("document bounds", "end at sequence 7 of 5"),
        ("negative length", "a sequence has -1 tokens"),
        ("pointers", "are not contiguous"),
    ],
)
def test_a_damaged_data_set_is_named(tmp_path: Path, kind: str, message: str) -> None:
    prefix = tmp_path / "a"
    write_data_set(prefix, DOCUMENTS)
    check_indexed_dataset(prefix)
    _damage(prefix, kind)
    with pytest.raises(ValueError, match=message) as caught:
        check_indexed_dataset(prefix)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_data_set_without_tokens_is_refused(tmp_path: Path) -> None:
    for documents in ([], [[]], [[[]], [[]]]):
        with pytest.raises(ValueError, match="holds no token"):
            check_indexed_dataset(write_data_set(tmp_path / "a", documents))


def test_token_ids_are_checked_and_the_document_named(tmp_path: Path) -> None:
    prefix = write_data_set(tmp_path / "a", DOCUMENTS)
    assert check_token_ids(prefix, vocab_size=11) == 10
    with pytest.raises(ValueError, match=r"document 4 holds the token id 10 \(its token 3\).*vocabulary of 10"):
        check_token_ids(prefix, vocab_size=10)
    with pytest.raises(ValueError, match=r"document 2 holds the token id 5 \(its token 1\)"):
        check_token_ids(prefix, vocab_size=5)


def test_a_large_data_set_is_sampled_from_end_to_end(tmp_path: Path) -> None:
    tokens = np.zeros(50_000, dtype=np.int64)
    for place in (0, 49_999):
        tokens[:], tokens[place] = 0, 500
        prefix = write_data_set(tmp_path / "a", [[tokens[:40_000].tolist()], [tokens[40_000:].tolist()]])
        with pytest.raises(ValueError, match=f"document {int(place > 0)} holds the token id 500"):
            check_token_ids(prefix, vocab_size=100, limit_tokens=9_000)
    tokens[:] = 0
    prefix = write_data_set(tmp_path / "a", [[tokens.tolist()]])
    assert 4_500 <= check_token_ids(prefix, vocab_size=100, limit_tokens=9_000) <= 9_000


@settings(max_examples=examples(200), deadline=None)
@given(lengths=st.lists(st.integers(0, 40), max_size=30), seq_length=st.integers(1, 25))
def test_each_token_lies_in_one_sample(lengths: list[int], seq_length: int) -> None:
    table = sample_table(np.array(lengths, dtype=np.int64), seq_length)
    seen = [
        (document, token)
        for document, start, length in zip(table.document, table.start, table.length, strict=True)
        for token in range(start, start + length)
    ]
    assert seen == [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    assert table.num_empty == lengths.count(0)
    assert all(1 <= length <= seq_length for length in table.length)
    # A piece ends only when it is full, so documents give as few samples as possible.
    assert len(table) == sum(-(-length // seq_length) for length in lengths)
