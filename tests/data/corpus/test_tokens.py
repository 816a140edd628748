"""Tokens of a data set by document, even if documents consist of several sequences."""

from __future__ import annotations

from pathlib import Path

from bytescale_ext.data.corpus.tokens import open_tokens
from bytescale_ext.data.samples.lengths import sample_table
from tests.data.corpus.books import write_texts
from tests.data.sources import write_data_set


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    corpus = open_tokens(write_data_set(tmp_path / "a", [[[1, 2], [3]], [], [[4, 5, 6, 7]]]))
    assert corpus.lengths.tolist() == [3, 0, 4]
    assert corpus.read(0, 1, 2).tolist() == [2, 3]
    assert corpus.read(2, 1, 3).tolist() == [5, 6, 7]
    pieces = corpus.pieces(sample_table(corpus.lengths, 3))
    assert [one.tolist() for one in pieces] == [[1, 2, 3], [4, 5, 6], [7]]


def test_text_of_bytes(tmp_path: Path) -> None:
    corpus = write_texts(tmp_path / "a", ["größer", "two words", "x"])
    assert corpus.is_bytes
    assert list(corpus.texts(sample_table(corpus.lengths, 100))) == ["größer", "two words", "x"]
    assert list(corpus.texts(sample_table(corpus.lengths, 3)))[:2] == ["gr\ufffd", "\ufffdß"]
