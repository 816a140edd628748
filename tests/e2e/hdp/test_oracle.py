"""Hybrid data parallelism trains like one process with one document per micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.plan.search.strategy import BLOCK_RECOMPUTE
from tests.e2e.oracle import gradients, relative_error, shard_of, train_documents_one_by_one
from tests.e2e.pipelines import FULL, SHARDED
from tests.e2e.training import HDP, MODEL, TRAIN, SavedRun, train, train_once
from tests.sample import sampled

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-5
CASES = {
    "plain": (4, ["--train-iters", 6]),
    "zero1-recompute-block": (4, ["--use-distributed-optimizer", *BLOCK_RECOMPUTE, 1]),
    "tp2-recompute-selective": (
        4,
        ["--tensor-model-parallel-size", 2, "--hdp-tokens-per-rank", 128, "--recompute-granularity", "selective"],
    ),
    "tp2-sp-zero1": (8, ["--tensor-model-parallel-size", 2, "--sequence-parallel", *SHARDED]),
    "three-ranks": (3, ["--hdp-tokens-per-rank", 86, "--global-batch-size", 9]),
    "one-rank": (1, ["--hdp-tokens-per-rank", 256]),
    "empty-ranks-recompute-full": (8, ["--hdp-tokens-per-rank", 256, *SHARDED, *FULL]),
    "hierarchical-rings": (
        4,
        "--hdp-static-width 4 --hdp-ranks-per-node 2 --hdp-hierarchical-rings always".split(),
    ),
}


def common(corpus: Path, flags: list[object]) -> list[object]:
    tp_size = flags[flags.index("--tensor-model-parallel-size") + 1] if "--tensor-model-parallel-size" in flags else 1
    return [*MODEL, *TRAIN, "--data-path", corpus, "--make-vocab-size-divisible-by", 128 // int(str(tp_size)), *flags]


def oracle_of(corpus: Path, batch: int, iterations: int) -> SavedRun:
    """Train one process with this global batch size, once in a test session."""
    one_by_one: list[object] = ["--micro-batch-size", 1, "--calculate-per-token-loss"]
    flags = common(corpus, [*one_by_one, "--global-batch-size", batch, "--train-iters", iterations])
    return train_once(1, *flags, entry=train_documents_one_by_one)


@pytest.mark.parametrize("name", sampled(CASES, ["plain"]))
def test_losses_and_gradients_are_those_of_one_process(name: str, corpus: Path, tmp_path: Path) -> None:
    num_ranks, flags = CASES[name]
    one = oracle_of(corpus, *((9, 2) if name == "three-ranks" else (8, 6)))
    saving = ["--save", tmp_path, "--save-wgrads-interval", 1]
    outcome = train(num_ranks, *common(corpus, [*HDP, "--train-iters", 2, *flags]), *saving)
    assert outcome.code is None
    assert len(outcome.losses) == (6 if name == "plain" else 2)
    assert outcome.losses == pytest.approx(one.losses[: len(outcome.losses)], rel=TOLERANCE)
    tp_size = 2 if "--tensor-model-parallel-size" in flags else 1
    expected = gradients(one.save)
    for tp_rank in range(tp_size):
        found = gradients(tmp_path, tp_rank=tp_rank)
        assert {key for key in found if "_extra" not in key} == set(expected)
        for key, value in found.items():
            error = relative_error(value, shard_of(expected[key], key, value, tp_rank, tp_size))
            assert error < TOLERANCE, f"{key}: {error=}"
