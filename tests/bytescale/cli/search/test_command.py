"""``bytescale search`` from the command line, on small tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bytescale_ext.measure.cost_file import read_cost, write_cost
from bytescale_ext.plan.search.explore import Exploration
from bytescale_ext.plan.search.strategy import parse_strategy
from megatron.bytescale import cli
from megatron.bytescale.cli.search import command
from tests.plan.search.tasks import COST

MODEL = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 128 --swiglu"
)
SIZES = ["--model-flags", f"{MODEL} --vocab-size 256", "--seq-length", "4K", "--global-batch-size", "8", "--ranks", "4",
         "--device-memory-gb", "1", "--steps", "2", "--best", "3"]  # fmt: skip
LINE = ["search", *SIZES, "--sampler", "github", "--device", "h100"]


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(words) == 0
    return capsys.readouterr().out


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(words) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_the_table_and_the_flags_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(LINE, capsys).splitlines()
    assert lines[0] == "NVIDIA H100 (published timings): 4 ranks, steps of 8 documents; predicted"
    assert [line.split()[0] for line in lines[3:6]] == ["1", "2", "3"]
    assert "planned and replayed" in lines[-2]
    flags = lines[-1].removeprefix("flags of the fastest: ").split()
    strategy = parse_strategy(flags, 1)
    assert str(strategy) in lines[3]


@pytest.mark.slow
def test_json_has_the_figures_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed([*LINE, "--json"], capsys))
    rows = found["strategies"]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert all(sum(row["parts"].values()) == pytest.approx(row["seconds"]) for row in rows)
    assert all(0 < row["mfu"] < 1 and row["device_gb"] <= 1 for row in rows)
    assert found["counts"]["replayed"] <= found["counts"]["fitting"]
    assert json.loads(printed([*LINE, "--json"], capsys)) == found


@pytest.mark.slow
def test_a_script_with_the_measured_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cost(tmp_path / "cost.json", COST)
    script = tmp_path / "launch.sh"
    words = ["search", *SIZES, "--sampler", "github", "--cost-file", str(tmp_path / "cost.json")]
    beside = tmp_path / "launch.cost.json"
    assert f"wrote {script} and its cost file {beside}" in printed([*words, "--output", str(script)], capsys)
    text = script.read_text()
    found = json.loads(printed([*words, "--json"], capsys))["strategies"][0]
    assert found["flags"] in " ".join(text.replace("\\\n", " ").replace("'", "").split())
    assert '--cost-file "$folder"/launch.cost.json' in text
    assert str(tmp_path) not in text
    assert f"--tensor-model-parallel-size {read_cost(beside).tensor_parallel} " in text
    assert script.stat().st_mode & 0o111
    assert "a step predicted" in text
    text = (printed([*words, "--output", str(script), "--launcher", "slurm"], capsys), script.read_text())[1]
    assert "#SBATCH --nodes=1" in text


@pytest.mark.slow
def test_costs_without_exchange_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cost(tmp_path / "cost.json", replace(COST, forward=replace(COST.forward, c=0.0)))
    words = ["search", *SIZES, "--sampler", "github", "--cost-file", str(tmp_path / "cost.json")]
    assert "has no exchange between ranks" in printed(words, capsys)


@pytest.mark.slow
def test_explain_has_a_row_for_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed([*LINE, "--explain", "tensor-model-parallel-size"], capsys).splitlines()
    assert sorted(line.split()[1] for line in lines[1:]) == ["1:", "2:"]
    found = json.loads(printed([*LINE, "--explain", "use-distributed-optimizer", "--json"], capsys))
    assert set(found) == {"on", "off"}
    best = json.loads(printed([*LINE, "--json"], capsys))["strategies"][0]
    assert min(row["seconds"] for row in found.values()) == best["seconds"]


@pytest.mark.slow
def test_what_is_assumed_or_not_tried_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*LINE, "--model-flags", f"{MODEL} --num-experts 2 --moe-layer-freq [0,1] --num-layers 2"]
    lines = printed(words, capsys).splitlines()
    assert "--model-flags has no --vocab-size: a vocabulary of 32,000 is assumed" in lines
    assert "expert layers are assumed to be spread evenly over the layers" in lines
    engine = "--vocab-size 256 --transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe tensorwise"
    text = printed([*LINE, "--model-flags", f"{MODEL} {engine}"], capsys)
    assert "FP8 is predicted as bfloat16, because the published timings are in bfloat16" in text
    assert "not tried: --activation-policy does not work with --fp8-format" in text


def open_size(words: list[str]) -> list[str]:
    """Return a command without the documents of a step."""
    place = words.index("--global-batch-size")
    return [*words[:place], *words[place + 2 :]]


@pytest.mark.slow
def test_the_documents_of_a_step_may_be_left_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*open_size(LINE), "--largest-batch-size", "19"]
    tasks = command.tasks_of(cli.parse(words))
    assert [(task.batch, len(task.steps)) for task in tasks] == [(4, 8), (8, 4), (16, 2)]
    text = printed([*words, "--output", str(tmp_path / "launch.sh"), "--plot", str(tmp_path / "search.png")], capsys)
    assert text.startswith("NVIDIA H100 (published timings): 4 ranks, steps of 4 or 8 or 16 documents; predicted")
    found = json.loads(printed([*words, "--json"], capsys))["strategies"]
    speeds = [row["tokens_per_second"] for row in found]
    assert speeds == sorted(speeds, reverse=True)
    assert f"--global-batch-size {found[0]['documents']}" in (tmp_path / "launch.sh").read_text()
    alone = json.loads(printed([*words, "--explain", "global-batch-size", "--json"], capsys))
    assert set(alone) == {"4", "8", "16"}
    assert max(row["tokens_per_second"] for row in alone.values()) == speeds[0]
    assert [task.batch for task in command.tasks_of(cli.parse(open_size(LINE)))] == [4, 8, 16, 32]
    assert [task.batch for task in command.tasks_of(cli.parse(LINE))] == [8]


def test_sizes_of_steps_that_conflict(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--largest-batch-size is for searches without" in refused([*LINE, "--largest-batch-size", "8"], capsys)
    few = refused([*open_size(LINE), "--largest-batch-size", "3"], capsys)
    assert "--largest-batch-size 3 is less than one document for each of --ranks 4: give at least 4" in few
    assert "give --global-batch-size" in refused([*open_size(LINE), "--verify", "1"], capsys)
    assert "does not vary it" in refused([*LINE, "--explain", "global-batch-size"], capsys)


@pytest.mark.slow
def test_explain_names_values_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    tight = [*LINE, "--device-memory-gb", "0.005", "--explain", "hdp-tokens-per-rank"]
    assert "--hdp-tokens-per-rank 4096: nothing fits (device memory)" in printed(tight, capsys)
    with_any = refused([*tight, "--device-memory-gb", "0.0001"], capsys)
    assert "no strategy fits with any value of --hdp-tokens-per-rank" in with_any


@pytest.mark.slow
def test_an_interrupted_search_prints_what_it_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = command.explore

    def interrupted(*words: object) -> Iterator[Exploration]:
        for seen in real(*words):  # type: ignore[arg-type]
            yield seen
            if seen.found:
                raise KeyboardInterrupt

    monkeypatch.setattr(command, "explore", interrupted)
    assert cli.main(LINE) == 0
    shown = capsys.readouterr()
    assert "stopped; the best so far:" in shown.err
    assert shown.out.splitlines()[3].split()[0] == "1"
