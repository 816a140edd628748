"""Hybrid data parallelism trains as one process does that sees the same documents one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.training import (
    HDP,
    MODEL,
    TRAIN,
    Outcome,
    gradients,
    relative_error,
    shard_of,
    train,
    train_documents_one_by_one,
    write_documents,
)

TOLERANCE = 1e-5
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
CASES = {
    "plain": (4, ["--train-iters", 10]),
    "zero1-overlap": (4, SHARDED),
    "zero1": (4, ["--use-distributed-optimizer"]),
    "overlap-grad-reduce": (4, ["--overlap-grad-reduce"]),
    "tp2": (4, ["--tensor-model-parallel-size", 2, "--hdp-tokens-per-rank", 128]),
    "tp2-sp-zero1": (8, ["--tensor-model-parallel-size", 2, "--sequence-parallel", *SHARDED]),
    "recompute-full": (4, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()),
    "recompute-selective": (4, ["--recompute-granularity", "selective"]),
    "three-ranks": (3, ["--hdp-tokens-per-rank", 86, "--global-batch-size", 9]),
    "one-rank": (1, ["--hdp-tokens-per-rank", 256]),
    "empty-ranks": (8, ["--hdp-tokens-per-rank", 256, *SHARDED]),
    "static-width": (4, ["--hdp-static-width", 4]),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("corpus") / "docs")


def run(corpus: Path, save: Path, num_ranks: int, flags: list[object], entry: object = None) -> Outcome:
    tp_size = flags[flags.index("--tensor-model-parallel-size") + 1] if "--tensor-model-parallel-size" in flags else 1
    common = [*MODEL, *TRAIN, "--data-path", corpus, "--save", save, "--save-wgrads-interval", 1,
              "--make-vocab-size-divisible-by", 128 // int(str(tp_size))]  # fmt: skip
    return train(num_ranks, *common, *flags, entry=entry)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def oracle(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[list[float], Path]]:
    """Losses and gradients of the one process, by global batch size."""
    found = {}
    for batch in (8, 9):
        save = tmp_path_factory.mktemp(f"oracle{batch}")
        flags = ["--micro-batch-size", 1, "--calculate-per-token-loss", "--global-batch-size", batch]
        flags += ["--train-iters", 10 if batch == 8 else 5]
        found[batch] = (run(corpus, save, 1, flags, train_documents_one_by_one).losses, save)
    return found


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(
    name: str, corpus: Path, oracle: dict[int, tuple[list[float], Path]], tmp_path: Path
) -> None:
    num_ranks, flags = CASES[name]
    expected_losses, expected_save = oracle[9 if name == "three-ranks" else 8]
    outcome = run(corpus, tmp_path, num_ranks, [*HDP, *flags])
    assert outcome.code is None
    assert len(outcome.losses) == (10 if name == "plain" else 5)
    assert outcome.losses == pytest.approx(expected_losses[: len(outcome.losses)], rel=TOLERANCE)
    tp_size = 2 if "--tensor-model-parallel-size" in flags else 1
    expected = gradients(expected_save)
    for tp_rank in range(tp_size):
        found = gradients(tmp_path, tp_rank=tp_rank)
        assert {key for key in found if "_extra" not in key} == set(expected)
        for key, value in found.items():
            error = relative_error(value, shard_of(expected[key], key, value, tp_rank, tp_size))
            assert error < TOLERANCE, f"{key}: {error=}"
