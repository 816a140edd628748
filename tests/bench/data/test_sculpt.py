"""The bench of windows on synthetic texts, and its corpora."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.data.sculpt import debian_texts, measure, text_of, write_corpus
from tests.data.corpus.books import texts


@pytest.mark.full
def test_every_way_on_made_up_texts(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a", (text.encode() for text in texts()[0]), 10**6)
    assert corpus is not None
    bench = measure(corpus, 1000, tmp_path / "map.png")
    assert bench.documents == 120
    assert bench.tokens == corpus.lengths.sum()
    strict, concatenation = bench.rows["sculpt, none"].quality, bench.rows["concatenation (Megatron)"].quality
    assert strict.cut == 0 < concatenation.cut
    assert strict.relevance > concatenation.relevance
    lines = text_of("books", bench).splitlines()
    assert len(lines) == 3 + len(bench.rows) == 9
    assert "| 1.00 |" in lines[3]
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_corpus_ends_with_the_document_that_reaches_its_tokens(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a", iter([b"123", b"4567", b"8"]), 6)
    assert corpus is not None
    assert corpus.lengths.tolist() == [4, 5]
    assert write_corpus(tmp_path / "b", iter([]), 6) is None


def test_sources_of_documentation(tmp_path: Path) -> None:
    folder = tmp_path / "linux-doc-6.1" / "html"
    folder.mkdir(parents=True)
    (folder / "a.rst.txt").write_text("a")
    (folder / "b.rst.txt").write_text("b")
    (folder / "c.html").write_text("c")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "d.rst.txt").write_text("d")
    assert list(debian_texts(tmp_path)) == [b"a", b"b"]
    assert list(debian_texts(tmp_path / "none")) == []
