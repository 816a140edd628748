"""The bench on a cluster, without a cluster: its data, the order of its runs, their figures, its command line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from bytescale_ext.measure.metrics import append_jsonl
from bytescale_ext.measure.timeline import Phase, PhaseShard
from bytescale_ext.plan.cost.model_cost import ModelCost
from scripts.bench.cluster import speed
from scripts.bench.cluster.cases import Case, Planned
from scripts.bench.cluster.results import Results, Run
from tests.bench.cluster.samples import COST, SETTING, run_of

CASE = Case("byted", 2, 4)


def bench_of(folder: Path) -> speed.Bench:
    return speed.Bench(folder, num_steps=4, seed=0)


def test_documents_are_random_tokens_written_once(tmp_path: Path) -> None:
    prefix = bench_of(tmp_path).documents(CASE)
    data = IndexedDataset(str(prefix))
    assert data.sequence_lengths.tolist() == CASE.lengths(4, 0)
    assert max(np.max(data[i]) for i in range(0, len(data), 50)) <= 255
    before = prefix.with_suffix(".bin").stat().st_mtime_ns
    assert bench_of(tmp_path).documents(CASE) == prefix
    assert prefix.with_suffix(".bin").stat().st_mtime_ns == before


def phases_of(scale: float) -> list[Phase]:
    shards = (PhaseShard(1, 70, 35, (0, 1)), PhaseShard(0, 20, 20, (0,)))
    return [
        Phase(speed.TRACED_STEP, rank, kind, 0, start * scale, stop * scale, shards)
        for rank in range(2)
        for kind, start, stop in (("wait", 0.0, 1.0), ("forward", 1.0, 2.0), ("backward", 2.0, 4.5), ("reduce", 4.5, 9))
    ]


def test_a_step_is_measured_from_its_first_pass_to_its_last() -> None:
    phases = tuple(phases_of(1.0))
    assert speed.computing_seconds(phases) == 3.5
    assert speed.lengths_of(phases) == [20, 70]


def test_metrics_of_steps_are_read(tmp_path: Path) -> None:
    line = {"tokens_per_second": 5.0, "megabytes_sent_per_step": 6.0, "measured_imbalance": 1.5, "lm loss": 2.5, "x": 0}
    append_jsonl(tmp_path / "metrics.jsonl", [line, {**line, "lm loss": 2.0}])
    first, second = speed.read_steps(tmp_path)
    assert asdict(first) == {"tokens_per_second": 5.0, "megabytes_sent": 6.0, "imbalance": 1.5, "loss": 2.5}
    assert second.loss == 2.0


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the trainings; return the arms that ran."""
    ran: list[str] = []

    def run_arm(bench: speed.Bench, case: Case, arm: str, cost: object, folder: Path) -> Run:
        ran.append(arm)
        for phase in phases_of(1.0 + (arm == "static")):
            append_jsonl(folder / "timeline" / f"rank{phase.rank}.jsonl", [asdict(phase)])
        return run_of([1.0, 2.0, 3.0])

    monkeypatch.setattr(speed, "run_arm", run_arm)
    monkeypatch.setattr(speed, "preload", lambda: None)
    return ran


def test_arms_take_turns_and_continue_after_an_end(tmp_path: Path, order: list[str]) -> None:
    planned = Planned(CASE, ("ours", "packed", "static"))
    results = Results(tmp_path / "results.json", SETTING, COST)
    speed.run_all(bench_of(tmp_path), results, (planned,), 2)
    assert order == ["ours", "static", "static", "ours"]
    assert "do not fit" in results.refused(str(CASE))["packed"]
    again = Results.open(tmp_path / "results.json", SETTING)
    speed.run_all(bench_of(tmp_path), again, (planned,), 3)
    assert order[4:] == ["ours", "static"]


def test_an_arm_that_fails_does_not_end_the_others(
    tmp_path: Path, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    works = speed.run_arm

    def run_arm(bench: speed.Bench, case: Case, arm: str, cost: ModelCost, folder: Path) -> Run:
        if arm == "hybrid":
            raise RuntimeError("arm hybrid ended with exit code 1:\nsome lines\nValueError: it stops")
        return works(bench, case, arm, cost, folder)

    monkeypatch.setattr(speed, "run_arm", run_arm)
    results = Results(tmp_path / "results.json", SETTING, COST)
    speed.run_all(bench_of(tmp_path), results, (Planned(CASE, ("ours", "hybrid", "static")),), 1)
    assert order == ["ours", "static"]
    assert results.refused(str(CASE)) == {"hybrid": "it failed: ValueError: it stops"}
    monkeypatch.setattr(speed, "run_arm", works)
    speed.run_all(bench_of(tmp_path), results, (Planned(CASE, ("ours", "hybrid")),), 1)
    assert order[2:] == ["hybrid"], "the next start tries again what has failed"


@pytest.mark.slow
def test_the_first_and_the_last_arm_are_drawn(tmp_path: Path, order: list[str]) -> None:
    planned = Planned(CASE, ("ours", "naive", "static"))
    results = Results(tmp_path / "results.json", SETTING, COST)
    speed.run_all(bench_of(tmp_path), results, (planned,), 1)
    speed.draw(bench_of(tmp_path), results, planned, tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "--rounds 0"),
        (["--steps", "2"], "--steps 2"),
        (["--plot", "no-such-folder/a.png"], "no-such-folder"),
        (["--cases", "byted 0x4 matched"], "--nodes 0"),
        (["--cases", "byted 1x2 matched"], "do not fit on 2 ranks of C = 2048"),
        (["--cases", "byted 1x8 quick"], "links 'quick'"),
        (["--results", "{tmp}/results.json"], "has another setting"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Results(tmp_path / "results.json", {**SETTING, "seed": 7}).write()
    monkeypatch.setattr(speed, "check_machine", lambda topology: None)
    monkeypatch.setattr("sys.argv", ["speed.py", *(word.format(tmp=tmp_path) for word in words)])
    assert speed.main() == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("speed.py: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


def test_the_last_line_is_json(
    tmp_path: Path, order: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results(tmp_path / "results.json", SETTING, COST)
    results.write()
    words = ["--cases", str(CASE), "--arms", "ours", "static", "--results", str(results.path), "--json"]
    monkeypatch.setattr(speed, "check_machine", lambda topology: None)
    monkeypatch.setattr("sys.argv", ["speed.py", *words])
    assert speed.main() == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["speedup"]["static"]["median"] == 1.0
    assert list(last["cases"]) == [str(CASE)]
