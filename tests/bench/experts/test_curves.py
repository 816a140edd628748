"""Curves of the gate against routers of fixed k: what trains, and how losses are read. Losses come from the script."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.bytescale.arguments.parse import add_arguments
from scripts.bench.experts import curves
from scripts.bench.experts.curves import ARMS, DOCUMENTS, GATED, Point, Setting

SETTING = Setting("data", dense_steps=20, steps=40, experts=16, interval=10)


def log(losses: dict[int, float]) -> str:
    return "".join(
        f" validation loss at iteration {step} | lm loss value: {loss:.6E} | lm loss PPL: 1.0 | \n"
        for step, loss in losses.items()
    )


def metrics(steps: int, active: float = 0.0) -> str:
    row = {"num_steps": 1, "tokens_per_second": 1000.0, "step_seconds": 2.0, "active_experts": active}
    return "".join(json.dumps({**row, "iteration": step}) + "\n" for step in range(1, steps + 1))


def fake_run(flags: Sequence[str]) -> str:
    given = dict(itertools.pairwise(flags))
    steps, interval = int(given["--train-iters"]), int(given["--eval-interval"])
    if "--hdp-log-dir" in given:
        folder = Path(given["--hdp-log-dir"])
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(metrics(steps, 5.0 if "--moe-router-dts" in flags else 0.0))
    return log({step: 3 - step / 1000 for step in range(interval, steps + 1, interval)})


def test_more_experts_compute_more() -> None:
    dense, two, four = (curves.step_tflops(2000, experts) for experts in (None, 2, 4))
    assert dense == curves.step_tflops(2000, 1)
    assert four - two == pytest.approx(2 * (two - dense))
    assert curves.step_tflops(4000, 2) > 2 * two  # attention grows with the square


def test_points_join_the_log_and_the_metrics() -> None:
    found = curves.points(log({2: 1.5, 4: 1.25}), metrics(4, active=3.0), 2.0)
    each = curves.step_tflops(2000, 3.0)
    assert [(point.step, point.tokens, point.loss) for point in found] == [(2, 4000, 1.5), (4, 8000, 1.25)]
    assert [point.tflops for point in found] == pytest.approx([2 * each, 4 * each])
    assert curves.points(log({4: 1.25}), metrics(4), 2.0)[0].tflops == pytest.approx(4 * curves.step_tflops(2000, 2))


def test_other_arms_train_until_they_computed_as_much() -> None:
    found = curves.curves(SETTING, seeds=2, run=fake_run)
    gate = found[GATED][0][-1]
    assert list(found) == list(ARMS)
    assert gate.step == SETTING.steps
    for arm, of_arm in found.items():
        assert len(of_arm) == 2
        assert of_arm[0][-1].step % SETTING.interval == 0
        if arm != GATED:
            *_, before, end = of_arm[0]
            assert before.tflops < gate.tflops <= end.tflops
    assert found["top-1"][0][-1].step == found["dense"][0][-1].step > found["top-2"][0][-1].step > gate.step


def test_rows_compare_at_equal_steps_and_at_equal_flops() -> None:
    gate = [Point(10, 1, 2.0, 3.0), Point(20, 2, 4.0, 2.0)]
    longer = [Point(10, 1, 1.0, 4.0), Point(20, 2, 2.0, 3.0), Point(30, 3, 3.0, 2.5), Point(40, 4, 4.0, 1.5)]
    first, second = curves.rows({GATED: [gate], "top-2": [longer]}, last=1)
    assert (first["loss at equal steps"], first["loss at equal FLOPs"]) == (2.0, 2.0)
    assert (second["loss at equal steps"], second["loss at equal FLOPs"], second["steps"]) == (3.0, 1.5, 40)


def test_arms_differ_in_their_routers_alone() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    for arm in ARMS:
        ours, _ = parser.parse_known_args(curves.start_of(arm, SETTING, Path("runs")))
        assert bool(getattr(ours, "moe_router_dts", None)) == (arm == GATED)
    words = curves.start_of(GATED, SETTING, Path("runs"))
    assert words[words.index("--moe-dts-steps") + 1] == str(SETTING.steps // 2)
    assert words[words.index("--num-experts") + 1] == "16"
    assert curves.start_of("dense", SETTING, Path("runs"))[:2] == ["--pretrained-checkpoint", "runs/dense"]


def test_it_prints_a_row_for_each_arm_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "curves.png"
    words = ["curves.py", "--data", "data", "--steps", "40", "--interval", "10", "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(curves.curves, "__defaults__", (fake_run,))
    assert curves.main() == 0
    printed = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["arm"] for line in printed[: len(ARMS)]] == list(ARMS)
    assert printed[len(ARMS)].startswith(f"{GATED}: 10 2.990, 20 2.980")
    assert picture.stat().st_size > 1000


def test_documents_of_a_step_are_those_of_the_flags() -> None:
    assert curves.COMMON[curves.COMMON.index("--global-batch-size") + 1] == str(DOCUMENTS)


def test_a_failed_training_shows_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 2, stdout="x" * 5000, stderr="error: no such flag")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match=r"(?s)curves.py: error: a training failed:\nx{2000}error: no such flag"):
        curves.train(["--no-such-flag"])
