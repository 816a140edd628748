"""Windows of a data set on disk contain each token once, and documents of one topic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.corpus.sculpting import sculpt_corpus
from bytescale_ext.plan.sculpt.baselines import concatenated
from bytescale_ext.plan.sculpt.check import check_windows
from bytescale_ext.plan.sculpt.pieces import OVERFLOWS
from bytescale_ext.plan.sculpt.quality import quality_of
from bytescale_ext.plan.sculpt.sculpt import SculptSettings
from tests.data.corpus.books import texts, write_texts


def test_windows_are_about_one_topic(tmp_path: Path) -> None:
    corpus = write_texts(tmp_path / "a", texts()[0])
    made = sculpt_corpus(corpus, SculptSettings(1000), None)
    ours = quality_of(made.made.table, made.pieces, 1000)
    theirs = quality_of(concatenated(made.pieces, 1000, 1), made.pieces, 1000)
    assert (ours.cut, ours.tokens_kept) == (0, 1)
    assert ours.relevance > 1.5 * theirs.relevance
    assert made.num_long == 0
    assert made.cluster_tokens.sum() == corpus.lengths.sum()
    assert (np.diff(made.cluster_tokens) <= 0).all()


@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_documents_that_are_all_longer_than_a_window_are_cut(overflow: str, tmp_path: Path) -> None:
    corpus = write_texts(tmp_path / "a", texts()[0])
    context = int(corpus.lengths.min()) - 1
    made = sculpt_corpus(corpus, SculptSettings(context, overflow), None)
    check_windows(made.made.table, corpus.lengths, context, overflow)
    assert made.num_long == len(corpus.lengths)
    assert made.made.table["length"].max() == context
    if overflow != "truncate":
        assert made.made.table["length"].sum() == corpus.lengths.sum()


def test_a_data_set_without_tokens_is_refused(tmp_path: Path) -> None:
    corpus = write_texts(tmp_path / "a", ["word"])
    empty = replace(corpus, lengths=np.zeros_like(corpus.lengths))
    with pytest.raises(ValueError, match="its 1 documents have no tokens"):
        sculpt_corpus(empty, SculptSettings(10), None)
