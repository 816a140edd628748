"""The benchmark of whole steps: what it trains, times and prints, without training."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bytescale_ext.data.samples.lengths import read_idx_lengths
from scripts.bench.states import whole_step
from scripts.bench.states.whole_step import ARMS, MARK, options, timed, training_flags, write_corpus


def test_the_corpus_has_documents_of_a_micro_batch(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, 64, 3)
    assert list(read_idx_lengths(Path(f"{prefix}.idx"))) == [64] * 3


def test_a_step_and_its_optimizer_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = SimpleNamespace(step=lambda: sum(range(10**6)))

    def train_step(forward: Any, data: Any, model: Any, optimizer: Any, more: int) -> int:
        optimizer.step()
        return more + sum(range(10**6))

    assert timed(train_step)(None, None, None, optimizer, 7) == 7 + sum(range(10**6))
    step, update = map(float, capsys.readouterr().out.removeprefix(MARK).split())
    assert 0 < update < step
    assert optimizer.step() == sum(range(10**6))


def test_arms_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Medians over rounds, without first steps; what fails is told once and not run again."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        if "--optimizer-cpu-offload" in command:
            return subprocess.CompletedProcess(command, 2, "", "warning\nerror: it needs a GPU\n")
        seconds = 2.2 if "--state-policy" in command else 2.0
        steps = [(99.0, 9.0), (seconds, 0.5), (seconds + 0.1, 0.5), (seconds + 0.2, 0.5)]
        return subprocess.CompletedProcess(command, 0, "x\n" + "".join(f"{MARK}{a} {b}\n" for a, b in steps), "")

    monkeypatch.setattr(subprocess, "run", run)
    whole_step.main(["--tokens", "16", "--rounds", "2", "--arms", "resident", "stage 1", "offload", "--json"])
    *lines, figures = capsys.readouterr().out.strip().splitlines()
    found = json.loads(figures)
    assert found["stage 1"]["over_resident"] == pytest.approx(2.3 / 2.1)
    assert found["resident"]["steps"] == 6
    assert found["offload"] == {"failure": "error: it needs a GPU"}
    assert len(ran) == 5
    assert any(line.startswith("stage 1       2.300 s a step, optimizer 0.500 s (21.7%), 1.095") for line in lines)
    assert any("does not run here: error: it needs a GPU" in line for line in lines)


def test_all_arms_train_the_same(tmp_path: Path) -> None:
    flags = training_flags(options(["--tokens", "128", "--steps", "3"]), tmp_path / "docs")
    assert flags[flags.index("--seq-length") + 1] == flags[flags.index("--hdp-tokens-per-rank") + 1] == "128"
    assert not any("state" in flag for flag in flags)
    assert ARMS["resident"] == []
