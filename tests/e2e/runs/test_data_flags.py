"""Megatron's data flags select documents as documented: blends, splits, samples, epochs, seeds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.e2e.corpora import write_documents
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, documents_in_order, record_steps, train_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

LENGTHS = (256, 3, 190, 1, 17, 64, 40, 100, 33, 129, 8, 300)
# 12 documents; the last document gives two samples.
PIECES = 13
ONE_LAYER = ["--num-layers", "1"]
FIVE = ["--train-iters", 5]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    first = write_documents(folder / "first", lengths=LENGTHS, copies=1)
    return first, write_documents(folder / "second", lengths=LENGTHS, copies=5, seed=1)


@pytest.fixture(scope="module")
def five_steps(corpora: tuple[Path, Path]) -> list[Outcome]:
    return run("--data-path", corpora[1], *FIVE)


def run(*flags: object, num_ranks: int = 2, without: Collection[str] = ()) -> list[Outcome]:
    """Train without some flags of ``TRAIN`` and their values."""
    left_out = {TRAIN.index(flag) + place for flag in without for place in (0, 1)}
    common = [*MODEL, *ONE_LAYER, *(word for place, word in enumerate(TRAIN) if place not in left_out), *HDP]
    return train_ranks(num_ranks, *common, "--hdp-tokens-per-rank", 256 // num_ranks, *flags, entry=record_steps)


def flat(steps: list[list[str]]) -> list[str]:
    return [document for step in steps for document in step]


def number_of(document: str) -> int:
    return int(re.findall(r"document (\d+) tokens", document)[0])


def prefix_of(document: str) -> str:
    return document.partition(": document")[0]


def consumed_samples(outcome: Outcome) -> list[int]:
    return [int(count) for count in re.findall(r"consumed samples: +(\d+)", outcome.text)]


@pytest.mark.full
def test_blend_takes_documents_by_weight(corpora: tuple[Path, Path]) -> None:
    outcomes = run("--data-path", 0.25, corpora[0], 0.75, corpora[1], *FIVE)
    counts = Counter(map(prefix_of, flat(documents_in_order(outcomes))))
    assert counts == {str(corpora[0]): 10, str(corpora[1]): 30}


@pytest.mark.full
def test_weights_can_be_shares_of_tokens(tmp_path: Path) -> None:
    short, long = (
        write_documents(tmp_path / name, (size,), copies=40) for name, size in (("short", 20), ("long", 200))
    )
    weights = ("--data-path", 0.5, short, 0.5, long, "--global-batch-size", 44, "--train-iters", 2)
    documents, tokens = (run(*weights, "--hdp-blend-by", kind) for kind in ("documents", "tokens"))
    for outcomes, share in ((documents, 0.5), (tokens, 10 / 11)):
        counts = Counter(map(prefix_of, flat(documents_in_order(outcomes))))
        assert counts[str(short)] / counts.total() == pytest.approx(share, abs=0.03)
    assert "short 50.0% of the documents and 9.1% of the tokens" in documents[0].text
    assert "weights of the data path are shares of tokens" in tokens[0].text


@pytest.mark.full
def test_split_keeps_training_validation_and_test_apart(corpora: tuple[Path, Path]) -> None:
    outcomes = run("--data-path", corpora[1], *FIVE, "--split", "50,30,20", "--eval-interval", 2, "--eval-iters", 1)
    training = {number_of(document) for document in flat(documents_in_order(outcomes))}
    evaluations = documents_in_order(outcomes, training=False)
    assert len(evaluations) == 4  # after 2 and 4 iterations, at the end, and on the test set
    assert training == set(range(30))
    assert {number_of(document) for document in flat(evaluations[:3])} <= set(range(30, 48))
    assert {number_of(document) for document in evaluations[3]} <= set(range(48, 60))
    assert len(set(flat(evaluations[:2]))) == 16  # each evaluation continues after the previous evaluation


def test_a_data_path_for_each_split(corpora: tuple[Path, Path], tmp_path: Path) -> None:
    third = write_documents(tmp_path / "third", lengths=LENGTHS, copies=1, seed=2)
    paths = ["--train-data-path", corpora[1], "--valid-data-path", corpora[0], "--test-data-path", third]
    outcomes = run(*paths, "--train-iters", 2, "--eval-interval", 2, "--eval-iters", 1, without=["--split"])
    evaluations = documents_in_order(outcomes, training=False)
    assert {prefix_of(document) for document in flat(documents_in_order(outcomes))} == {str(corpora[1])}
    assert {prefix_of(document) for document in flat(evaluations[:-1])} == {str(corpora[0])}
    assert {prefix_of(document) for document in evaluations[-1]} == {str(third)}


@pytest.mark.full
def test_epochs_show_each_piece_once_in_a_new_order(corpora: tuple[Path, Path]) -> None:
    outcomes = run("--data-path", corpora[0], "--global-batch-size", 4, "--train-iters", PIECES)
    documents = flat(documents_in_order(outcomes))
    epochs = [documents[start : start + PIECES] for start in range(0, 4 * PIECES, PIECES)]
    assert len(set(epochs[0])) == PIECES
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.full
def test_train_samples_counts_documents(corpora: tuple[Path, Path], five_steps: list[Outcome]) -> None:
    samples = ["--train-samples", 40, "--lr-decay-samples", 80]
    outcomes = run("--data-path", corpora[1], *samples, without=["--train-iters", "--lr-decay-iters"])
    assert consumed_samples(outcomes[-1]) == [8, 16, 24, 32, 40]
    assert documents_in_order(outcomes) == documents_in_order(five_steps)
    assert outcomes[-1].losses == five_steps[-1].losses


@pytest.mark.full
def test_the_seed_and_not_the_ranks_make_the_order(corpora: tuple[Path, Path], five_steps: list[Outcome]) -> None:
    flags = ["--data-path", corpora[1], "--train-iters", 3]
    order = documents_in_order(five_steps)[:3]
    assert documents_in_order(run(*flags, num_ranks=4)) == order
    assert documents_in_order(run(*flags, "--hdp-plan-ahead", 5)) == order
    assert documents_in_order(run(*flags, "--seed", 1)) != order


@pytest.mark.parametrize("kind", sampled(["documents", "tokens"], ["tokens"]))
def test_a_blend_is_equal_on_any_number_of_ranks(kind: str, corpora: tuple[Path, Path]) -> None:
    blend = ("--data-path", 0.3, corpora[0], 0.7, corpora[1], "--hdp-blend-by", kind, "--train-iters", 3)
    alone, many = (documents_in_order(run(*blend, num_ranks=num_ranks)) for num_ranks in (1, 4))
    assert many == alone
    assert {prefix_of(document) for document in flat(alone)} == {str(corpus) for corpus in corpora}


@pytest.mark.full
def test_an_index_alone_gives_the_lengths_of_each_step(five_steps: list[Outcome]) -> None:
    """The planned lengths equal the lengths of the documents that were read."""
    for documents, record in zip(documents_in_order(five_steps), five_steps[0].records(), strict=True):
        spans = [re.findall(r"tokens (\d+)-(\d+)$", document)[0] for document in documents]
        assert [int(stop) - int(start) for start, stop in spans] == record["lengths"]
