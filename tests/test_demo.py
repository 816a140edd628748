"""Demo and the bench of its training: flags, figures and files. tests/e2e trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts import demo
from scripts.bench.plan import hdp_e2e
from scripts.bench.report import printed_by
from tests.harness import run_ranks


def step(iteration: int, **changed: Any) -> dict[str, Any]:
    figures = {
        "iteration": iteration,
        "lm loss": 6.0 - iteration,
        "tokens_per_second": 100.0 * iteration,
        "planned_imbalance": 1.1,
        "measured_imbalance": 1.2,
        "padding_share": 0.0,
        "micro_batches_per_rank": [iteration, 2 * iteration],
        "megabytes_sent_per_step": 1.0,
        "attention_calls_per_step": 4.0,
    }
    return {**figures, **changed}


def write_timeline(folder: Path) -> None:
    (folder / "timeline").mkdir()
    for rank in range(2):
        shards = [[{"seq": 0, "length": 90, "tokens": 45, "ring": [0, 1]}],
                  [{"seq": 1 + rank, "length": 7, "tokens": 7, "ring": [rank]}]]  # fmt: skip
        phases = [{"step": demo.TIMELINE_STEP, "rank": rank, "kind": "forward", "micro_batch": i, "start": i,
                  "stop": i + 1, "shards": shards[i]} for i in range(2)]  # fmt: skip
        (folder / "timeline" / f"rank{rank}.jsonl").write_text("".join(json.dumps(phase) + "\n" for phase in phases))


def parse_flags(rank: int, world: int, argv: list[str]) -> tuple[int, int]:
    import sys

    from megatron.bytescale.arguments.parse import parse
    from megatron.bytescale.arguments.resolve import resolve

    sys.argv = ["pretrain_gpt_hdp.py", *argv]
    args = parse(sys.argv, on_cpu=True)
    cluster = resolve(args).cluster
    return cluster.tokens_per_rank, args.train_iters


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_flags_are_taken_by_megatron(num_ranks: int, tmp_path: Path) -> None:
    flags = demo.Demo(num_ranks, on_cpu=True, folder=tmp_path).flags
    capacity, num_steps = run_ranks(parse_flags, num_ranks, flags)[0]
    assert capacity * num_ranks >= int(demo.CONTEXT[1])
    assert num_steps >= demo.TIMELINE_STEP
    static = demo.Demo(num_ranks, on_cpu=True, folder=tmp_path, is_static=True)
    assert run_ranks(parse_flags, num_ranks, static.flags)[0] == (capacity, num_steps)
    assert static.num_steps < num_steps


def test_a_finished_run_is_known_by_its_command(tmp_path: Path) -> None:
    run = demo.Demo(4, on_cpu=True, folder=tmp_path)
    assert run.key == demo.Demo(4, on_cpu=True, folder=tmp_path).key
    assert run.key != demo.Demo(2, on_cpu=True, folder=tmp_path).key
    assert run.key != demo.Demo(4, on_cpu=False, folder=tmp_path).key


@pytest.mark.slow
def test_summary_and_pictures(tmp_path: Path) -> None:
    write_timeline(tmp_path)
    run = demo.Demo(2, on_cpu=True, folder=tmp_path)
    steps = [step(1), step(2), step(3)]
    static = [step(1), step(2, **{"lm loss": 4.25}), step(3, tokens_per_second=200.0)]
    summary = demo.summarize(run, steps, static)
    assert summary["largest_loss_difference_to_static"] == 0.25
    assert (summary["first_loss"], summary["last_loss"]) == (5.0, 3.0)
    assert summary["tokens_per_second"] == 250  # the first step is left out
    assert summary["speed_over_static"] == [1, 1.25, 1.5]
    assert summary["micro_batches_per_rank"] == [2.5, 5]
    assert summary["ring_widths_of_timeline"] == [1, 2]
    assert summary["shortest_and_longest_of_timeline"] == [7, 90]
    demo.draw(run, steps, static)
    for name in ("loss.png", "timeline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    console = Console(record=True, width=160)
    demo.show(run, summary, console)
    text = console.export_text()
    assert "5.000 -> 3.000 in 3 steps" in text
    assert "1.25 times as fast in the median of steps 2 to 5, 1.00 to 1.50" in text
    assert "rings of 1, 2 ranks" in text


def test_half_a_line_of_metrics_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert demo.read_metrics(path) == []
    path.write_text(json.dumps(step(1)) + "\n" + json.dumps(step(2))[:20])
    assert [line["iteration"] for line in demo.read_metrics(path)] == [1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 0", "invalid choice: 0 (choose from 1, 2, 3, 4, 6, 12)"),
        ("--ranks 5", "invalid choice: 5"),
        ("--ranks many", "argument --ranks: invalid int value: 'many'"),
        (f"--output {__file__}", "no folder can be made there (File exists)"),
    ],
)
def test_bad_options_end_in_one_line(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.sys, "argv", ["demo.py", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        demo.main()
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_documents_of_a_step_can_be_shared_out() -> None:
    documents = int(demo.TRAIN[demo.TRAIN.index("--global-batch-size") + 1])
    assert demo.RANKS == tuple(n for n in range(1, documents + 1) if not documents % n)


@pytest.mark.ranks
def test_a_failed_training_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; print('the cause'); sys.exit(3)"
    monkeypatch.setattr(demo.Demo, "command", property(lambda self: [demo.sys.executable, "-c", script]))
    with pytest.raises(RuntimeError, match=r"(?s)exit code 3.*train.log.*the cause"):
        demo.train(demo.Demo(1, on_cpu=True, folder=tmp_path), Console())


def test_arms_of_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = hdp_e2e.arm_flags(tmp_path / "cost.json", 2)
    assert tuple(flags) == ("hdp", "naive", "static")
    assert flags["hdp"] == ["--cost-file", str(tmp_path / "cost.json")]
    assert flags["static"][-1] == "2"
    piped = hdp_e2e.arm_flags(tmp_path / "cost.json", 4, 2)
    assert tuple(piped) == ("eager", "slices", "1f1b")
    assert piped["1f1b"][2:] == ["--pipeline-model-parallel-size", "2", "--hdp-tokens-per-rank", "4096"]
    assert piped["slices"] == [*piped["1f1b"], "--seq1f1b-slices", "4"]
    commands: list[list[str]] = []
    monkeypatch.setattr(hdp_e2e, "printed_by", commands.append)
    run = demo.Demo(2, on_cpu=True, folder=tmp_path)
    hdp_e2e.measure_cost(run, tmp_path / "cost.json")
    (command,) = commands
    script = command.index("--no-python") + 1
    assert command[: script - 1] == run.command[: script - 1]
    assert "--nproc-per-node=2" in command[:script]
    assert command[script].endswith("bytescale")
    assert command[script + 1] == "profile"
    assert command[command.index("--") + 1 :] == run.flags


@pytest.mark.ranks
def test_a_command_that_fails_shows_the_end_of_what_it_printed() -> None:
    assert printed_by([demo.sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]) == "1\n"
    with pytest.raises(RuntimeError, match=r"(?s)exit code 3.*the cause"):
        printed_by([demo.sys.executable, "-c", "import sys; print('the cause'); sys.exit(3)"])


def test_benchmark_compares_equal_steps() -> None:
    arms = {
        "hdp": [step(2, tokens_per_second=300.0), step(3, tokens_per_second=300.0)],
        "naive": [step(2, tokens_per_second=300.0), step(3, tokens_per_second=240.0)],
        "static": [step(2, tokens_per_second=100.0), step(3, tokens_per_second=200.0)],
    }
    figures = hdp_e2e.compare({arm: 2 * steps for arm, steps in arms.items()})
    assert figures["num_steps"] == 4
    assert figures["speedup"]["static"] == {"median": 2.25, "lowest": 1.5, "highest": 3.0}
    assert figures["speedup"]["naive"] == {"median": 1.125, "lowest": 1.0, "highest": 1.25}
    assert figures["largest_loss_difference"] == 0
    assert figures["arms"]["static"]["tokens_per_second"] == 150
