"""``bytescale schedule``: its table, its figures, its picture, and refused input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytescale_ext.plan.schedule.actions import parse_schedule, seq1f1b_schedule
from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale import cli

WORDS = ["schedule", "--pipeline-parallel", "4", "--micro-batches", "8", "--slices", "4"]


def shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(words) == 0
    return capsys.readouterr().out


def test_the_table_parses_back(capsys: pytest.CaptureFixture[str]) -> None:
    table, figures = shown(WORDS, capsys).split("\n\n")
    assert parse_schedule(table) == seq1f1b_schedule(4, 8, Slicing(4))
    assert "bubble                0.0943 (0.0857 if all slices cost the same)" in figures
    assert "slices on stage 0     7 at most" in figures


def test_schedules_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown([*WORDS, "--vpp", "2", "--compare"], capsys).splitlines()
    assert [line[:18].strip() for line in lines[1:7]] == [
        "1F1B", "1F1B-I", "Seq1F1B even", "Seq1F1B time", "Seq1F1B-I even", "Seq1F1B-I time",
    ]  # fmt: skip
    rows = json.loads(shown([*WORDS, "--vpp", "2", "--compare", "--json"], capsys))
    assert [round(row["bubble"], 2) for row in rows] == [0.27, 0.16, 0.39, 0.09, 0.16, 0.05]
    assert [row["peak_slices"] for row in rows] == [4, 11, 7, 7, 14, 14]


def test_zero_bubble_beside_whole_backward_passes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(shown([*WORDS, "--zero-bubble", "--compare", "--json"], capsys))
    assert [row["name"] for row in rows] == ["1F1B", "Seq1F1B even", "Seq1F1B time", "Seq1F1B time ZB"]
    whole, split = rows[2:]
    assert split["bubble"] < whole["bubble"]
    assert split["bubble_of_equal_costs"] == pytest.approx(3 / (3 * 32 + 3))
    assert split["activation_bytes"] == whole["activation_bytes"]


def test_explicit_slices_and_one_slice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule", "--pipeline-parallel", "2", "--micro-batches", "2", "--slices", "2", "--seq-length", "10"]
    rows = json.loads(shown([*words, "--seq1f1b-partition", "6,4", "--json"], capsys))
    assert rows[0]["slices"] == [6, 4]
    assert rows[0]["name"] == "Seq1F1B explicit"
    rows = json.loads(
        shown(["schedule", "--pipeline-parallel", "2", "--micro-batches", "2", "--json", "--compare"], capsys)
    )
    assert [row["name"] for row in rows] == ["1F1B"]


@pytest.mark.slow
def test_the_schedule_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["schedule", "--pipeline-parallel", "2", "--micro-batches", "2", "--plot", f"{tmp_path}/a.svg"]
    assert shown(words, capsys).endswith(f"wrote {tmp_path}/a.svg\n")
    assert "stage 1" in (tmp_path / "a.svg").read_text()


def test_measured_costs_set_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from bytescale_ext.measure.cost_file import shipped

    cost = shipped("bytescale_7b")
    (tmp_path / "cost.json").write_text(json.dumps(cost.to_json()))
    row = json.loads(shown([*WORDS, "--cost-file", str(tmp_path / "cost.json"), "--json"], capsys))[0]
    tokens, layers = row["peak_micro_batches"] * 131072, cost.shape.num_layers / 4
    most_sums = 131072 * 2 * 2 * cost.shape.num_kv_heads * cost.shape.head_dim * 2
    assert tokens * layers * cost.layer_bytes < row["activation_bytes"]
    assert row["activation_bytes"] < layers * (tokens * cost.layer_bytes + most_sums)
