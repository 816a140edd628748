"""Updates that overlap with training: all layouts train equally, and a resumed run equals an uninterrupted run.

``tests/states/test_lock_free.py`` tests the updates themselves.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.corpora import write_documents
from tests.e2e.states.test_paged import PAGED, SHARDED, WINDOW, with_disk
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, step_losses, train_ranks

pytestmark = pytest.mark.ranks

STEPS, SAVED = 6, 3
LATE = ["--state-update-steps", 1]
HOST_GB = 1.8e-4  # including 70,000 bytes of a rank for gradients and results


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a private copy, because Megatron writes its sample index next to the data set."""
    return write_documents(tmp_path_factory.mktemp("corpus") / "docs", copies=2)


def run(num_ranks: int, documents: Path, folder: Path, *flags: object) -> list[Outcome]:
    """Train on documents, evaluate after the second and fourth step, and save after the third and the last."""
    common = [*TRAIN, *MODEL, *HDP, "--data-path", documents, "--train-iters", STEPS, "--save-interval", SAVED]
    common += ["--split", "60,20,20", "--eval-interval", 2, "--eval-iters", 1, "--hdp-log-dir", folder]
    common += ["--save", folder, "--ckpt-format", "torch_dist"]
    outcomes = train_ranks(num_ranks, *common, *flags)
    assert outcomes[0].code in (None, 0), outcomes[0].text[-2000:]
    return outcomes


def test_all_layouts_train_alike_and_runs_go_on(documents: Path, tmp_path: Path) -> None:
    """Two ranks share the optimizer, with pages on a disk. One rank has all states, gradients and parameters in host
    memory. Steps after a save or an evaluation see all updates; other steps lack the last update.
    """
    shared = [*LATE, *SHARDED, "--hdp-tokens-per-rank", 128]
    folders = [tmp_path / name for name in ("two", "resumed", "one")]
    two = run(2, documents, folders[0], *with_disk(tmp_path / "pages", HOST_GB), *shared)
    resumed_flags = ["--load", folders[0], "--ckpt-step", SAVED]
    resumed = run(2, documents, folders[1], *with_disk(tmp_path / "more", HOST_GB), *shared, *resumed_flags)
    one = run(1, documents, folders[2], *LATE, *PAGED, *WINDOW, "--hdp-tokens-per-rank", 256)
    losses = [step_losses(folder) for folder in folders]
    assert len(losses[0]) == STEPS
    assert losses[1] == losses[0][SAVED:]
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert two[-1].validation_losses[-2:] == resumed[-1].validation_losses[-2:]
    assert two[-1].validation_losses == pytest.approx(one[-1].validation_losses, rel=1e-5)
    for folder in folders:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        stale = [row["stale_steps"] for row in rows]
        assert stale == [row["most_stale_steps"] for row in rows]
        assert stale == [0, 1, 0, 0, 0, 1][-len(stale) :]
    assert "updates overlap with 1 step(s)" in two[0].text
    assert "parameters lacked the gradients of 1.00 steps, 1 at most" in two[-1].text
