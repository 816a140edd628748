"""Commands and results of ``--verify``. ``tests/e2e/runs/test_search.py`` trains with it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.samples.epochs import EpochOrder
from bytescale_ext.data.samples.lengths import read_idx_lengths
from bytescale_ext.plan.search.costed import CostedStrategy, StepFigures
from bytescale_ext.plan.search.explore import ScoredStrategy
from bytescale_ext.plan.search.strategy import Strategy
from bytescale_ext.plan.setup.forecast import StepTime
from megatron.bytescale import cli
from megatron.bytescale.cli.search import verify
from megatron.bytescale.cli.search.verify import SEED, Verified, measured, verified, verified_text
from tests.bytescale.cli.search.test_command import LINE
from tests.plan.search.tasks import STEPS, small_task

ROW = Verified(1, "tp 1", 0.5, 2.0)


def in_bash(code: str) -> list[str]:
    """Return a command that replaces a training."""
    return ["bash", "-c", code]


def writing(seconds: list[float]) -> str:
    """Return code that writes the metrics of steps."""
    rows = [{"step_seconds": one, "device_peak_megabytes": 0.0} for one in seconds]
    rows[-1]["device_peak_megabytes"] = 2100.0
    return f"printf '%s\\n' {' '.join(shlex.quote(json.dumps(row)) for row in rows)} > metrics.jsonl"


def test_a_training_reads_the_steps_of_the_task(tmp_path: Path) -> None:
    verify.write_documents(tmp_path / "documents", STEPS, 50)
    lengths = read_idx_lengths(tmp_path / "documents")
    order = EpochOrder(len(lengths), SEED, 0).rows(np.arange(len(lengths)))
    assert lengths[order].reshape(len(STEPS), -1).tolist() == [list(step) for step in STEPS]


def test_the_first_steps_and_the_measured_one_are_not_timed(tmp_path: Path) -> None:
    row = measured(in_bash(writing([9.0, 8.0, 0.6, 0.8, 0.7, 5.0])), tmp_path, ROW)
    assert (row.seconds, row.gb, row.failure) == (0.7, 2.1, "")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("echo 'pretrain_gpt_hdp.py: error: no --lr'; exit 2", "no --lr"),
        ("echo '[rank1]: torch.OutOfMemoryError: CUDA out of memory'; exit 1", "torch.OutOfMemoryError: CUDA out"),
        ("exit 7", "exit code 7"),
    ],
)
def test_a_training_that_fails_is_a_row(code: str, reason: str, tmp_path: Path) -> None:
    row = measured(in_bash(code), tmp_path, ROW)
    assert row.failure.startswith(reason)
    assert (row.seconds, row.gb) == (None, None)


def test_a_training_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MOST_SECONDS", 0.3)
    row = measured(["sleep", "1000"], tmp_path, ROW)
    assert row.failure == "it takes longer than 0.3 s"


def test_strategies_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = tuple(StepFigures(StepTime(1.0 + step, 0, 0, 0, 1.0), 1e9 + step, 0) for step in range(2))
    strategies = [Strategy(1, (6,), tokens, shares_optimizer=True) for tokens in (1024, 2048, 4096)]
    scored = [ScoredStrategy(strategy, figures, small_task()) for strategy in strategies]
    commands = []

    def run(command: list[str], folder: Path, row: Verified) -> Verified:
        if len(commands) == 2:
            raise KeyboardInterrupt
        commands.append((command, Path(command[1]).read_text(encoding="utf-8")))
        return row

    monkeypatch.setattr(verify, "measured", run)
    args = cli.parse([*LINE, "--verify", "3"])
    rows = verified(args, small_task(), scored)
    assert [row.number for row in rows] == [1, 2]
    assert rows[0].predicted_seconds == 1.5
    fullest = max(STEPS, key=sum)
    assert rows[0].predicted_gb * 1e9 == CostedStrategy.of(small_task(), scored[0].strategy).step_bytes(fullest)
    for (command, script), tokens in zip(commands, (1024, 2048), strict=True):
        assert f"--hdp-tokens-per-rank {tokens}" in script
        assert command[command.index("--train-iters") + 1] == "5"
        assert command[command.index("--hdp-memory-step") + 1] == "5"
        assert ("--vocab-size" in command) == ("--vocab-size" not in " ".join(LINE))


def test_the_table_is_in_measured_order() -> None:
    rows = [
        Verified(1, "tp 1", 1.0, 2.0, 1.2, 2.1),
        Verified(2, "tp 2", 1.1, 2.0, failure="no --lr"),
        Verified(3, "tp 4", 1.2, 4.0, 1.0, 3.0),
    ]
    lines = verified_text(rows).splitlines()
    assert lines[1].split() == ["3", "tp", "4", "1.2", "1", "0.83", "4", "3", "0.750"]
    assert lines[2].split() == ["1", "tp", "1", "1", "1.2", "1.20", "2", "2.1", "1.050"]
    assert lines[3] == "2  tp 2: failed: no --lr"
    assert lines[-2] == "rank correlation of predicted and measured times: -1.00"
    assert lines[-1] == "the first strategy of the search takes 1.200 times as long as the fastest"
    assert verified_text(rows[1:2]).splitlines()[-1] == lines[3]
