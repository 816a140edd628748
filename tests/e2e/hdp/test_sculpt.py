"""Training on windows of documents equals one process on the same windows, with both kinds of attention."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.corpus.tokens import open_tokens
from bytescale_ext.data.corpus.windows_file import WindowsHeader, save_windows, sha256_of
from bytescale_ext.data.samples.lengths import sample_table
from bytescale_ext.plan.sculpt.check import check_windows
from bytescale_ext.plan.sculpt.pieces import Pieces, window_bounds
from bytescale_ext.plan.sculpt.sculpt import SculptSettings, sculpt
from tests.data.sources import write_data_set
from tests.e2e.once import once
from tests.e2e.oracle import gradients, relative_error, train_documents_one_by_one
from tests.e2e.training import HDP, MODEL, TRAIN, SavedRun, train, train_once, train_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

CONTEXT = 256
TOLERANCE = 1e-5
ONE_BY_ONE = ["--micro-batch-size", 1, "--calculate-per-token-loss"]
TWO_RANKS = [*HDP, "--hdp-tokens-per-rank", 128]


@pytest.fixture(scope="module")
def windows(corpus: Path) -> Path:
    """Return the file of windows of the corpus, which split documents. Also writes a data set of whole windows."""
    return once(lambda folder: write_windows(folder, corpus), "windows", str(corpus))


def write_windows(folder: Path, corpus: Path) -> Path:
    data = open_tokens(str(corpus))
    table = sample_table(data.lengths, CONTEXT)
    vectors = np.random.RandomState(0).standard_normal((len(table), 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    pieces = Pieces(table.document.astype(np.int64), table.start, table.length, vectors)
    made = sculpt(pieces, SculptSettings(CONTEXT, "split")).table
    check_windows(made, data.lengths, CONTEXT, "split")
    save_windows(folder / "a.windows.npy", made, WindowsHeader(CONTEXT, "split", 1234, sha256_of(f"{corpus}.idx")))
    bounds = window_bounds(made).tolist()
    rows = made[["document", "start", "length"]].tolist()
    whole = [[np.concatenate([data.read(*row) for row in rows[first:end]]).tolist()] for first, end in pairwise(bounds)]
    write_data_set(folder / "whole", whole)
    return folder / "a.windows.npy"


def flags(corpus: Path, windows: Path, attention: str) -> list[object]:
    given = ["--data-path", corpus, "--sculpt-windows", windows, "--sculpt-attention", attention]
    return [*MODEL, *TRAIN, *given]


LATER = ["--mtp-num-layers", 1]  # the layer predicts tokens of the window, or of the document


def check_equal(run: SavedRun, expected: SavedRun) -> None:
    assert len(expected.losses) == 3
    assert run.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    wanted, found = gradients(expected.save), gradients(run.save)
    assert {key for key in found if "_extra" not in key} == {key for key in wanted if "_extra" not in key}
    for key, value in found.items():
        if "_extra" not in key:
            assert relative_error(value, wanted[key]) < TOLERANCE, key


@pytest.mark.parametrize("hdp", sampled([True, False], [True]), ids=["hdp", "stock"])
def test_attention_across_a_window_is_that_of_one_sequence(hdp: bool, corpus: Path, windows: Path) -> None:
    whole = ["--data-path", windows.parent / "whole"]
    expected = train_once(1, *MODEL, *TRAIN, *whole, *ONE_BY_ONE, entry=train_documents_one_by_one)
    given = flags(corpus, windows, "window")
    check_equal(train_once(2, *given, *TWO_RANKS) if hdp else train_once(1, *given, *ONE_BY_ONE), expected)


@pytest.mark.full
def test_attention_inside_documents_is_that_of_a_mask(corpus: Path, windows: Path) -> None:
    given = flags(corpus, windows, "document")
    masked = train_once(1, *given, *ONE_BY_ONE)
    check_equal(train_once(2, *given, *TWO_RANKS), masked)
    across = train_once(2, *flags(corpus, windows, "window"), *TWO_RANKS)
    assert across.losses != pytest.approx(masked.losses, rel=1e-3)


@pytest.mark.full
def test_a_resumed_run_goes_on_with_the_next_window(corpus: Path, windows: Path, tmp_path: Path) -> None:
    given = flags(corpus, windows, "document")
    whole = train_once(2, *given, *TWO_RANKS)
    saving = [*TWO_RANKS, "--ckpt-format", "torch_dist", "--save", tmp_path]
    train(2, *given, *saving, "--exit-interval", 2)
    resumed = train(2, *given, *saving, "--load", tmp_path)
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=TOLERANCE)
    assert "WARNING: the checkpoint counts" not in resumed.text
    longer = ["--train-iters", 4, "--data-path", corpus]
    outcomes = train_ranks(2, *MODEL, *TRAIN, *longer, *saving, "--load", tmp_path)
    told = "the checkpoint counts 24 windows of a.windows.npy; they count as documents from now on"
    assert told in "".join(outcome.text for outcome in outcomes)


def test_windows_of_another_data_set_end_before_anything_is_built(windows: Path) -> None:
    outcome = train(2, *flags(windows.parent / "whole", windows, "window"), *TWO_RANKS)
    assert (outcome.code, outcome.losses) == (2, [])


@pytest.mark.full
def test_later_tokens_of_a_window_are_those_of_one_sequence(corpus: Path, windows: Path) -> None:
    whole = ["--data-path", windows.parent / "whole"]
    expected = train_once(1, *MODEL, *TRAIN, *whole, *LATER, *ONE_BY_ONE, entry=train_documents_one_by_one)
    check_equal(train_once(2, *flags(corpus, windows, "window"), *LATER, *TWO_RANKS), expected)


@pytest.mark.full
def test_later_tokens_end_with_a_document_inside_a_window(corpus: Path, windows: Path) -> None:
    given = [*flags(corpus, windows, "document"), *LATER]
    alone = train_once(1, *given, *HDP, "--hdp-tokens-per-rank", CONTEXT)
    check_equal(train_once(2, *given, *TWO_RANKS), alone)
    across = train_once(2, *flags(corpus, windows, "window"), *LATER, *TWO_RANKS)
    assert across.losses != pytest.approx(alone.losses, rel=1e-3)
