"""Vectors of documents with the same topic are similar, from words and from token ids. Bad embedders are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bytescale_ext.data.corpus.embed import check_embedder, embed, reduced, unit, word_counts
from bytescale_ext.data.corpus.tokens import open_tokens
from bytescale_ext.data.samples.lengths import sample_table
from tests.data.corpus.books import TOPICS, texts, write_texts
from tests.data.sources import write_data_set
from tests.sample import sampled


def likeness(vectors: np.ndarray, topics: list[int]) -> tuple[float, float]:
    """Return the mean cosine of two documents of the same topic, and of different topics."""
    products = vectors @ vectors.T
    same = np.equal.outer(topics, topics)
    off = ~np.eye(len(topics), dtype=bool)
    return float(products[same & off].mean()), float(products[~same].mean())


@pytest.mark.slow
def test_documents_of_a_topic_are_alike(tmp_path: Path) -> None:
    made, topics = texts()
    corpus = write_texts(tmp_path / "a", made)
    vectors = embed(corpus, sample_table(corpus.lengths, 10_000), None, 1)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    same, other = likeness(vectors, topics)
    assert same > 0.6
    assert other < 0.1


LETTERS = {"Chinese": range(0x4E00, 0x4F00), "Thai": range(0x0E01, 0x0E2F)}


@pytest.mark.slow
@pytest.mark.parametrize("script", sampled(LETTERS, ["Chinese"]))
def test_texts_without_spaces_are_as_near_as_with_spaces(script: str) -> None:
    random = np.random.RandomState(5)
    letters = list(map(chr, LETTERS[script]))
    size = 2 if script == "Chinese" else 4
    words = [["".join(random.choice(letters, size)) for _ in range(60)] for _ in range(7)]
    topics = [topic for topic in range(1, 7) for _ in range(10)]
    made = [[str(random.choice(words[topic if random.rand() < 0.4 else 0])) for _ in range(150)] for topic in topics]
    shares = []
    for blank in (" ", ""):
        vectors = reduced(word_counts([blank.join(text) for text in made]), 1)
        products = vectors @ vectors.T - 9 * np.eye(len(topics))
        nearest = np.argsort(-products, axis=1)[:, :9]
        shares.append(float((np.array(topics)[nearest] == np.array(topics)[:, None]).mean()))
    assert min(shares) > 0.95


@pytest.mark.slow
def test_a_text_with_blanks_between_its_words_gives_these_words() -> None:
    def features(text: str) -> set[int]:
        return set(word_counts([text]).indices.tolist())

    spaced = "\u4eca\u5929 \u5929\u6c14\u3002"
    assert len(features(spaced)) == 2
    assert len(features(spaced.replace(" ", ""))) == 3 + 3  # letters and pairs of letters
    assert features(spaced) < features(spaced.replace(" ", ""))


def test_token_ids_stand_for_words(tmp_path: Path) -> None:
    made, topics = texts()
    number = {word: 300 + i for i, word in enumerate(" ".join(TOPICS).split())}
    documents = [[[number[word] for word in text.split()]] for text in made]
    corpus = open_tokens(write_data_set(tmp_path / "a", documents))
    same, other = likeness(embed(corpus, sample_table(corpus.lengths, 10_000), None, 1), topics)
    assert same > 0.6
    assert other < 0.1


@pytest.mark.parametrize("documents", [["one"], ["one", "two"], ["", "", ""], ["a b", "c d", "e f", "g h"]])
def test_documents_without_common_words(documents: list[str]) -> None:
    vectors = reduced(word_counts(documents), 1)
    assert vectors.shape[0] == len(documents)
    assert np.isfinite(vectors).all()


def test_a_model_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake of sentence-transformers: vectors of the first and last letter."""
    seen = []

    class Model:
        def __init__(self, path: str, local_files_only: bool) -> None:
            seen.append((path, local_files_only))

        def encode(self, documents: list[str]) -> np.ndarray:
            return np.array([[ord(one[0]), ord(one[-1])] for one in documents], dtype=np.float64)

    module = SimpleNamespace(SentenceTransformer=Model, __spec__=SimpleNamespace(name="sentence_transformers"))
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    check_embedder(f"hf:{tmp_path}")
    corpus = write_texts(tmp_path / "a", ["ab", "ba"])
    vectors = embed(corpus, sample_table(corpus.lengths, 100), f"hf:{tmp_path}", 1)
    assert seen == [(str(tmp_path), True)]
    assert np.allclose(vectors, unit(np.array([[97.0, 98], [98, 97]])))
    numbers = open_tokens(write_data_set(tmp_path / "b", [[[300]]]))
    with pytest.raises(ValueError, match=r"needs text, and the tokens of .*b are not bytes"):
        embed(numbers, sample_table(numbers.lengths, 100), f"hf:{tmp_path}", 1)


@pytest.mark.parametrize(
    ("embedder", "message"),
    [("bert", "give hf:PATH"), ("hf:", "give hf:PATH"), ("hf:none", "there is no folder none")],
)
def test_bad_embedders(embedder: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_embedder(embedder)
