"""The benchmarks for a GPU run on CPU with tiny sizes, and every arm computes the same loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale_ext.cost_file import read_cost

ROOT = Path(__file__).resolve().parents[2]
ARMS = {
    "none",
    "full recompute",
    "full recompute, inputs on host",
    "recompute MLP",
    "save_on_cpu",
    "keep attention output",
    "alpha 0",
    "memo",
    "priced",
}


def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "bench" / name), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, cwd=ROOT)


def results(name: str, *words: str) -> dict[str, Any]:
    done = run(name, "--device", "cpu", "--quick", "--json", *words)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", ["gpu_activations.py", "gpu_activations_host_bound.py"])
def test_arms_differ_in_everything_but_the_loss(name: str) -> None:
    rows = results(name)["rows"]
    assert {row["num_tokens"] for row in rows} == {64, 130}
    for length in (64, 130):
        arms = {row["arm"]: row for row in rows if row["num_tokens"] == length}
        assert set(arms) >= ARMS
        assert {row["loss"] for row in arms.values()} == {arms["none"]["loss"]}
        assert all(row["step_seconds"] > 0 for row in arms.values())
        assert arms["none"]["swapped_bytes"] == arms["save_on_cpu"]["recomputed_flops"] == 0
        assert arms["keep attention output"]["recomputed_flops"] > arms["memo"]["recomputed_flops"] >= 0
        assert arms["alpha 0"]["swapped_bytes"] > 0
        assert arms["priced"]["alpha"] == 0.0  # everything fits: nothing is done
    assert ("alpha 0.5" in {row["arm"] for row in rows}) == (name == "gpu_activations.py")


def test_calibration_writes_a_cost_file(tmp_path: Path) -> None:
    figures = results("gpu_activations_calibrate.py", "--repeats", "2", "--output", str(tmp_path / "cost.json"))
    assert all(speed > 0 for speed in figures["link_gb_per_second"].values())
    assert [row["num_tokens"] for row in figures["layer"]] == [64, 128, 256]
    cost = read_cost(tmp_path / "cost.json")
    assert cost.forward.a > 0 and cost.backward.b > 0
    assert {row["arm"] for row in results("gpu_activations.py", "--cost", str(tmp_path / "cost.json"))["rows"]} >= ARMS


def test_arms_of_memory_plans_learn_the_same() -> None:
    figures = results("gpu_memory_plan.py")
    assert [row["arm"] for row in figures["rows"]] == ["default", "expandable segments", "buffers", "plan"]
    assert len({row["loss"] for row in figures["rows"]}) == 1
    assert 0 < figures["plan"]["buffer_bytes"] < figures["plan"]["bound_bytes"] <= figures["plan"]["peak_bytes"]


@pytest.mark.parametrize("name", ["gpu_activations.py", "gpu_activations_calibrate.py", "gpu_memory_plan.py"])
def test_without_a_gpu_the_message_says_what_to_do(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run(name)
    assert done.returncode == 2 and "--device cpu --quick" in done.stderr
