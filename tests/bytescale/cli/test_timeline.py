from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bytescale_ext.plan.cost.model_cost import flops_cost
from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from bytescale_ext.plan.evaluate.replay import replay
from megatron.bytescale.cli import timeline as command
from tests.plan.simple_plans import plan_naive


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Write timelines of two ranks in steps 4 and 5. In step 5 rank 0 computes for 3 s and rank 1 for 1 s."""
    directory = tmp_path / "timeline"
    directory.mkdir()
    shards = [{"seq": 0, "length": 8, "tokens": 4, "ring": [0, 1]}]
    for rank, stop in ((0, 13.0), (1, 11.0)):
        events = [
            {"step": step, "rank": rank, "kind": kind, "micro_batch": 0, "start": start, "stop": end, "shards": shards}
            for step in (4, 5)
            for kind, start, end in (("forward", 10.0, 10.5), ("backward", 10.5, stop))
        ]
        (directory / f"rank{rank}.jsonl").write_text("\n".join(map(json.dumps, events)))
    return directory


@pytest.mark.slow
def test_measured(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", measured, "--output", tmp_path / "out") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["rank", "0", "busy", "100.0%", "finish", "3", "s"]
    assert out[1].split() == ["rank", "1", "busy", "33.3%", "finish", "1", "s"]
    assert out[2].startswith("imbalance 1.500")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_measured_figures_as_json(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", measured, "--step", 4, "--output", tmp_path / "out", "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["step"], value["unit"], value["makespan"], value["imbalance"]) == (4, "s", 3.0, 1.5)
    assert value["ranks"][1] == {"rank": 1, "busy": 1.0, "busy_share": pytest.approx(1 / 3), "finish": 1.0}


@pytest.mark.slow
def test_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_naive([70, 30, 5], 5, 20)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    assert run("--plan", tmp_path / "plan.json", "--output", tmp_path / "out", "--json") == 0
    value = json.loads(capsys.readouterr().out)
    expected = replay(plan, flops_cost(LLAMA_7B))
    assert value["unit"] == "PFLOP"
    assert len(value["ranks"]) == 5
    assert value["imbalance"] == pytest.approx(expected.imbalance)
    assert [rank["busy"] for rank in value["ranks"]] == pytest.approx([x * 1e-15 for x in expected.rank_seconds])
    assert value["makespan"] == pytest.approx(expected.makespan * 1e-15)


def test_bad_plans_are_named(measured: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step 9 has no phases"):
        run("--from", measured, "--step", 9, "--output", tmp_path / "out")
    for text in ("{", "[]", "{}", '{"num_ranks": "many"}'):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(ValueError, match="is not the output of bytescale plan --json"):
            run("--plan", tmp_path / "plan.json", "--output", tmp_path / "out")
    value = plan_naive([70, 30, 5], 5, 20).to_json()
    value["ranks"][0][0]["shards"][0]["ring"] = [0, 1]
    (tmp_path / "plan.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"is a broken plan: rank 1 has ring 0-3 for seq 0, others have ring 0,1$"):
        run("--plan", tmp_path / "plan.json", "--output", tmp_path / "out")
