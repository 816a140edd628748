"""docs/guide/recipes.md: its launch lines, at small sizes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.e2e.corpora import write_documents
from tests.e2e.docs.pages import ROOT, code_lines, small_training
from tests.e2e.training import documents_in_order, record_steps, step_losses, train, train_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.full]

PAGE = ROOT / "docs" / "guide" / "recipes.md"


def recipe(**places: Path) -> list[str]:
    """Return the flags of the page's launch line, shrunk, with these folders."""
    (line,) = (line for line in code_lines(PAGE.read_text()) if line.startswith("torchrun "))
    words = shlex.split(line)
    flags = words[words.index("pretrain_gpt_hdp.py") + 1 :]
    values = {"--split": "100,0,0", **{f"--{name.replace('_', '-')}": str(path) for name, path in places.items()}}
    return [*small_training(flags, values), "--eval-iters", "0"]


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of stock Megatron after 3 steps of 4 windows of 64 tokens, and its data."""
    folder = tmp_path_factory.mktemp("stock")
    write_documents(folder / "docs")
    line = recipe(load=folder / "none", save=folder / "stock", data_path=folder / "docs")
    for flag, values in (("--hybrid-data-parallel", 0), ("--hdp-tokens-per-rank", 1), ("--finetune", 0), ("--load", 1)):
        del line[line.index(flag) : line.index(flag) + values + 1]
    short = ["--seq-length", 64, "--train-iters", 3, "--micro-batch-size", 1, "--rotary-base", 10000]
    outcomes = train_ranks(2, *line, *short, "--init-method-std", 0.2)
    assert outcomes[0].code is None, outcomes[0].text[-500:]
    return folder


def test_an_8k_checkpoint_goes_on_with_long_documents(windows: Path, tmp_path: Path) -> None:
    found = {}
    for num_ranks in (2, 4):
        line = recipe(load=windows / "stock", save=tmp_path / f"save{num_ranks}", data_path=windows / "docs")
        log = tmp_path / f"log{num_ranks}"
        outcomes = train_ranks(num_ranks, *line, "--log-interval", 1, "--hdp-log-dir", log, entry=record_steps)
        assert [record["iteration"] for record in outcomes[0].records()] == [1, 2]
        assert "windows of" not in "".join(outcome.text for outcome in outcomes)
        found[num_ranks] = documents_in_order(outcomes), step_losses(log)
    assert found[2][0] == found[4][0]
    assert found[2][1] == pytest.approx(found[4][1], rel=1e-5)
    fresh = recipe(load=tmp_path / "none", save=tmp_path / "fresh", data_path=windows / "docs")
    fresh.remove("--finetune")
    train(2, *fresh, "--log-interval", 1, "--hdp-log-dir", tmp_path / "log")
    assert abs(step_losses(tmp_path / "log")[0] - found[2][1][0]) > 1e-3  # the checkpoint's weights were loaded


def test_without_finetune_the_windows_count_as_documents_and_the_log_says_so(windows: Path, tmp_path: Path) -> None:
    line = recipe(load=windows / "stock", save=tmp_path / "save", data_path=windows / "docs")
    line.remove("--finetune")
    line += ["--train-iters", "4", "--override-opt-param-scheduler", "--no-load-optim", "--no-load-rng"]
    outcomes = train_ranks(2, *line, entry=record_steps)
    said = "".join(outcome.text for outcome in outcomes)
    assert (
        len(re.findall(r"WARNING: the checkpoint counts 12 windows of 64 tokens; they count as documents", said)) == 1
    )
    assert [record["iteration"] for record in outcomes[0].records()] == [4]
