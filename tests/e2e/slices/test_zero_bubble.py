"""Pipelines with deferred weight gradients equal the same pipelines without, in losses and every gradient."""

from __future__ import annotations

import pytest

from tests.e2e.corpora import write_documents
from tests.e2e.oracle import relative_error
from tests.e2e.slices.test_seq1f1b import TOLERANCE, Runs, read_gradients, stages
from tests.sample import sampled

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    corpus = write_documents(tmp_path_factory.mktemp("corpus") / "docs", lengths=(70, 9, 120, 33, 5, 200), copies=4)
    return Runs(corpus, tmp_path_factory.mktemp("runs"))


CASES = {
    "whole micro-batches": (2, "", ""),
    "tensor parallel": (4, "--tensor-model-parallel-size 2", "--seq1f1b-slices 2 --sequence-parallel"),
}


@pytest.mark.parametrize("name", sampled(CASES, ["whole micro-batches"]))
def test_training_is_the_same(name: str, runs: Runs) -> None:
    num_ranks, flags, slices = CASES[name]
    runs.compare(num_ranks, f"{stages(2, 3)} {flags}", f"--seq1f1b-zero-bubble {slices}")


@pytest.mark.full
def test_gradients_are_reduced_once_they_are_complete(runs: Runs) -> None:
    """In the second step DDP counts the gradients of a bucket, and starts to reduce the bucket when it is complete.

    Both stages wait for their last weight gradients: the first stage after its last backward pass, the second stage in
    the exchange that sends its gradient. With SGD, parameters differ as much as gradients.
    """
    flags = f"{stages(2, 6)} --optimizer sgd --seq1f1b-slices 2 --overlap-grad-reduce"
    compared = runs.compare(4, flags, "--seq1f1b-zero-bubble --seq1f1b-eager")
    assert len(compared.losses) == 2
    whole, split = sorted(runs.folder.iterdir())[-2:]
    first, second = read_gradients(whole, 2), read_gradients(split, 2)
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        assert relative_error(gradient, second[name]) <= TOLERANCE, name
