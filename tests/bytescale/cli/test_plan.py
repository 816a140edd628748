from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.measure.cost_file import shipped, write_cost
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.hdp.table import PLANNERS
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.plan import StepPlan
from megatron.bytescale.cli import plan as command
from megatron.bytescale.cli.shared.lengths import draw_pieces
from tests.plan.simple_plans import plan_naive, plan_static


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    np.save(tmp_path / "lengths.npy", np.array([30, 7, 55, 8, 8, 2, 19], dtype=np.int32))
    return tmp_path / "lengths.npy"


def write_idx(path: Path, document_tokens: list[list[int]]) -> None:
    """Write a Megatron index of documents, each given as the tokens of its sequences."""
    lengths = [tokens for document in document_tokens for tokens in document]
    ends = np.cumsum([0] + [len(document) for document in document_tokens])
    with path.open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + np.uint64(1).tobytes() + np.uint8(8).tobytes())
        file.write(np.uint64(len(lengths)).tobytes() + np.uint64(len(ends)).tobytes())
        file.write(np.array(lengths, dtype=np.int32).tobytes())
        file.write((2 * np.cumsum([0, *lengths])[:-1]).astype(np.int64).tobytes())
        file.write(ends.astype(np.int64).tobytes())


def test_json_is_the_plan(lengths_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--lengths", lengths_file, "--ranks", 6, "--tokens-per-rank", 10, "--balance", "none", "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert list(value) == ["num_ranks", "tokens_per_rank", "lengths", "ranks"]
    assert set(value["ranks"][0][0]["shards"][0]) == {"seq", "ranges", "ring"}
    plan = StepPlan.from_json(value)
    check_step_plan(plan, [30, 7, 55, 8, 8, 2, 19])
    assert plan == plan_naive([30, 7, 55, 8, 8, 2, 19], 6, 10)


def test_table_and_summary(lengths_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--lengths", lengths_file, "--ranks", 6, "--tokens-per-rank", 12, "--tokens-multiple", 4)
    assert run(*options, "--balance", "none") == 0
    out = capsys.readouterr().out
    assert "seq 2 [0:6][50:55] ring 0-4" in out or "seq 2 [0:6][50:55] ring 1-5" in out
    for words in (
        "micro-batches per rank  min",
        "tokens per rank ",
        "padding ",
        "planned imbalance ",
        "digest ",
        "makespan / bound ",
    ):
        assert words in out
    assert plan_naive([30, 7, 55, 8, 8, 2, 19], 6, 12, 4).digest() in out


def plan_of(capsys: pytest.CaptureFixture[str], *words: object) -> StepPlan:
    assert run(*words, "--json") == 0
    return StepPlan.from_json(json.loads(capsys.readouterr().out))


def score_of(capsys: pytest.CaptureFixture[str], *words: object) -> float:
    assert run(*words) == 0
    return float(re.search(r"makespan / bound +([\d.]+) \(", capsys.readouterr().out)[1])


@pytest.mark.slow
def test_balance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = sample_lengths("byted", 1 << 16, 1 << 20, seed=0).tolist()
    np.save(tmp_path / "lengths.npy", np.array(lengths))
    options = ("--lengths", tmp_path / "lengths.npy", "--ranks", 16, "--tokens-per-rank", 8192)
    assert plan_of(capsys, *options) == plan_of(capsys, *options, "--balance", "auto")
    assert plan_of(capsys, *options) == plan_of(capsys, *options, "--balance", "dp")
    assert plan_of(capsys, *options, "--balance", "none") == plan_naive(lengths, 16, 8192)
    assert 1 <= score_of(capsys, *options) < score_of(capsys, *options, "--balance", "none")
    for balance in ("auto", *(row.name for row in PLANNERS if row.aligned)):
        plan = plan_of(capsys, *options, "--pipeline-parallel", 2, "--balance", balance, "--ranks-per-node", 4)
        check_step_plan(plan, lengths)
        assert plan.aligned


def test_costs_of_a_file(lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the costs take twice the time, with the same ratio to the bound."""
    cost = shipped("bytescale_7b")
    doubled = replace(cost, forward=cost.forward.scaled(2), backward=cost.backward.scaled(2), head_forward=0.0,
                      head_backward=0.0, device="another GPU")  # fmt: skip
    write_cost(tmp_path / "cost.json", doubled)
    options = ("--lengths", lengths_file, "--ranks", 6, "--tokens-per-rank", 12, "--balance", "none")
    assert score_of(capsys, *options, "--device", "bytescale") == pytest.approx(
        score_of(capsys, *options, "--cost-file", tmp_path / "cost.json"), 0.01
    )
    assert run(*options, "--cost-file", tmp_path / "cost.json") == 0
    assert "another GPU)" in capsys.readouterr().out


def test_window_and_pieces(lengths_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--lengths", lengths_file, "--ranks", 4, "--tokens-per-rank", 10, "--json")
    assert run(*options, "--start", 1, "--num-sequences", 2, "--seq-length", 20) == 0
    assert json.loads(capsys.readouterr().out)["lengths"] == [7, 20, 20, 15]
    assert run(*options, "--start", 5) == 0
    assert json.loads(capsys.readouterr().out)["lengths"] == [2, 19]


def test_static_width(lengths_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--lengths", lengths_file, "--ranks", 8, "--tokens-per-rank", 16, "--static-width", 4, "--json") == 0
    plan = StepPlan.from_json(json.loads(capsys.readouterr().out))
    assert plan == plan_static([30, 7, 55, 8, 8, 2, 19], 8, 16, 4)


def test_index_files_are_read_by_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_idx(tmp_path / "corpus.idx", [[5], [3, 4], [], [9]])
    words = ("--lengths", tmp_path / "corpus.idx", "--ranks", 2, "--tokens-per-rank", 8)
    assert run(*words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["lengths"] == [5, 7, 9]  # the empty document gives no sample
    with pytest.raises(ValueError, match="documents 2 to 2 hold no token"):
        run(*words, "--start", 2, "--num-sequences", 1)


def test_pieces_are_drawn_twice_only_when_there_are_too_few() -> None:
    pieces = [1, 5, 5, 2, 3]
    assert sorted(draw_pieces([1, 12, 3], 5, 5, seed=0)) == sorted(pieces)
    assert draw_pieces([1, 12, 3], 5, 3, seed=7) == draw_pieces([1, 12, 3], 5, 3, seed=7)
    more = draw_pieces([1, 12, 3], 5, 40, seed=0)
    assert len(more) == 40
    assert set(more) == set(pieces)
