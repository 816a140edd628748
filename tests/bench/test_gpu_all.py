"""The driver of the GPU benches, with small programs as commands."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import gpu_all
from scripts.bench.gpu_all import (
    Command,
    Limits,
    Result,
    finished,
    json_of,
    last_message,
    plan_text,
    run_all,
    run_one,
)
from scripts.bench.gpu_commands import gpu_commands

AMPLE = Limits(60.0, 10.0)


def program(name: str, text: str, minutes: float = 1.0) -> Command:
    """Return a command that runs a Python program; its headline is the value of "x"."""
    return Command(name, (sys.executable, "-c", text), minutes, lambda figures: f"x is {figures['x']}")


def counted(name: str, file: Path, minutes: float = 1.0) -> Command:
    """Return a command that adds a line to a file."""
    return program(name, f"open({str(file)!r}, 'a').write('ran\\n'); print('hello'); print('{{\"x\": 7}}')", minutes)


def runs_of(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.ranks
def test_figures_log_table_and_summary_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results"
    words = (sys.executable, "-c", "import sys, json; print(json.dumps({'x': sys.argv[1]}))", "{output}")
    folder = Command("folder", words, 1.0, lambda _: "nothing")
    one, two = run_all([counted("one", tmp_path / "file"), folder], AMPLE, output)
    assert (one.name, one.status, one.figures) == ("one", "done", {"x": 7})
    assert two.figures == {"x": str(output)}
    assert (output / "one.log").read_text() == 'hello\n{"x": 7}\n'
    assert [row["figures"] for row in json.loads((output / "summary.json").read_text())] == [one.figures, two.figures]
    table = (output / "table.txt").read_text().splitlines()
    assert table[0].endswith("x is 7")
    assert capsys.readouterr().out.splitlines() == table


def test_figures_may_precede_a_warning_of_nccl() -> None:
    assert json_of(["1", '{"x": 7}', "[rank0]: destroy_process_group() was not called"]) == {"x": 7}
    assert json_of(["1", "[rank0]: a warning"]) is None
    assert json_of([]) is None


def test_an_error_may_precede_a_warning_of_nccl() -> None:
    assert last_message(["Error: no memory", "[rank0]: Warning: destroy_process_group() was not called", ""]) == (
        "Error: no memory"
    )
    assert last_message(["[rank0]: Warning: late"]) == last_message([]) == "no message"


@pytest.mark.ranks
def test_finished_commands_are_not_run_again(tmp_path: Path) -> None:
    """A command runs again only on request, with other words, or after a failure."""
    file, output = tmp_path / "file", tmp_path / "results"
    command = counted("one", file)
    run_all([command], AMPLE, output)
    (again,) = run_all([command], AMPLE, output)
    assert (again.status, again.figures, runs_of(file)) == ("done before", {"x": 7}, 1)
    assert run_all([command], AMPLE, output, again=True)[0].status == "done"
    assert runs_of(file) == 2
    assert finished(program("one", "print(1)"), output) is None
    failing = program("one", f"open({str(file)!r}, 'a').write('ran\\n'); raise SystemExit(3)")
    for _ in range(2):
        assert "exit code 3" in run_all([failing], AMPLE, output)[0].status
    assert runs_of(file) == 4


@pytest.mark.ranks
def test_a_failed_command_is_reported_and_the_others_run(tmp_path: Path) -> None:
    failing = program("failing", "print('{\"x\": 1}'); raise ValueError('no such kernel')")
    silent = program("silent", "print('no figures')")
    other = program("other", "print('{\"y\": 1}')")
    results = run_all([failing, silent, other, counted("good", tmp_path / "file")], AMPLE, tmp_path / "results")
    assert [result.figures for result in results] == [None, None, {"y": 1}, {"x": 7}]
    assert results[0].status == "exit code 1: ValueError: no such kernel"
    assert results[1].status == "exit code 0: no figures"
    assert "its JSON has no headline (KeyError: 'x')" in gpu_all.row_text(other, results[2])


@pytest.mark.full
@pytest.mark.ranks
def test_a_slow_command_is_ended_with_its_children(tmp_path: Path) -> None:
    """Its output is kept, and it runs again the next time."""
    text = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('row 1', child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    # The time limit grows until two interpreters start within it on a slow machine.
    for seconds in (2, 20, 120):
        result = run_one(program("slow", text), seconds / 60, tmp_path)
        assert result.status.startswith("ended after")
        assert result.figures is None
        printed = (tmp_path / "slow.log").read_text().split()
        if printed:
            break
    assert printed[:2] == ["row", "1"]
    for _ in range(1000):
        if not is_running(int(printed[2])):
            break
        time.sleep(0.1)
    assert not is_running(int(printed[2]))
    assert finished(program("slow", text), tmp_path) is None


def is_running(process: int) -> bool:
    """Return whether a process runs; one that has ended may still wait for its parent."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.ranks
def test_commands_that_would_not_end_in_time_are_not_started(tmp_path: Path) -> None:
    """Shorter commands run after them. A long command counts with its budget."""
    file = tmp_path / "file"
    commands = [counted("long", file, 40.0), counted("longer", file, 8.0), counted("short", file, 2.0)]
    results = run_all(commands, Limits(5.0, 9.0), tmp_path / "results")
    assert [result.status.split(",")[0] for result in results] == ["not started", "not started", "done"]
    assert runs_of(file) == 1
    assert "long" in plan_text(commands, Limits(5.0, 9.0)).splitlines()[0]
    assert plan_text(commands, Limits(12.0, 9.0)).splitlines() == [
        "long                    40.0 minutes  ended at the limit",
        "longer                   8.0 minutes  not started",
        "short                    2.0 minutes",
        "started                 11.0 of 12 minutes",
    ]


def test_the_most_valuable_commands_fit_half_an_hour() -> None:
    """Tests come first, then kernels, overlap of swap, memory and speed. A second call runs the others."""
    commands = gpu_commands(device_gb=70.0)
    names = [command.name for command in commands]
    assert names == [
        "tests", "attention", "calibration", "activations_32k", "profile", "activations_128k", "memory_plan",
        "training", "merge", "slices", "moe", "host_bound",
    ]  # fmt: skip
    assert sum(command.minutes for command in commands[:8]) <= 30
    assert all(0.2 < command.minutes < 9 for command in commands)
    for command in commands:
        assert Path(command.words[1]).is_file()
        assert "--json" in command.words
    assert "{output}/cost.json" in commands[2].words  # calibration writes the file that the arms read
    assert [command.name for command in commands if command.reads] == ["activations_32k", "activations_128k"]


def test_the_file_of_an_earlier_command_is_read_if_it_was_written(tmp_path: Path) -> None:
    command = Command("a", ("run", "{output}/x"), 1.0, str, ("--cost-file", "{output}/cost.json"))
    assert command.words_for(tmp_path) == ["run", f"{tmp_path}/x"]
    (tmp_path / "cost.json").write_text("{}")
    assert command.words_for(tmp_path) == ["run", f"{tmp_path}/x", "--cost-file", f"{tmp_path}/cost.json"]


def test_the_plan_is_printed_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_all.py", "--dry-run", "--minutes", "8"])
    assert gpu_all.main() == 0
    out = capsys.readouterr().out
    assert "activations_128k" in out
    assert "not started" in out


@pytest.mark.parametrize(
    ("status", "code"), [("done", 0), ("done before", 0), ("not started, 1.0 minutes left", 0), ("exit code 2: x", 1),
                         ("ended after 9.0 minutes", 1)],
)  # fmt: skip
def test_the_exit_code_tells_failures(monkeypatch: pytest.MonkeyPatch, status: str, code: int) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_all.py"])
    monkeypatch.setattr(gpu_all, "run_all", lambda *_: [Result("a", "done", 1.0, {}), Result("b", status, 1.0)])
    assert gpu_all.main() == code


HEADLINES: dict[str, tuple[dict[str, Any], str]] = {
    "tests": (
        {"passed": 90, "failed": 1, "error": 1, "skipped": 4, "failures": ["tests/a.py::b", "tests/c.py"]},
        "90 passed, 2 failed, 4 skipped, first tests/a.py::b",
    ),
    "profile": ({"largest_error": 0.034}, "largest error of unseen lengths 3.4%"),
    "attention": (
        {"kernel": "k", "rows": [
            {"width": 2, "kernel_ratio": 1.1, "teraflops_per_second": 5.0},
            {"width": 0, "kernel_ratio": 9.0, "teraflops_per_second": 6.0},
        ]},
        "k: ring over one call 1.100 at worst, 6 TFLOP/s at best",
    ),
    "merge": (
        {"rows": [
            {"intervals": "one", "num_rows": 8, "way": "torch", "gb_per_second": 1.0},
            {"intervals": "one", "num_rows": 9, "way": "torch", "gb_per_second": 10.0},
            {"intervals": "one", "num_rows": 9, "way": "fused", "gb_per_second": 30.0},
            {"intervals": "two", "num_rows": 9, "way": "fused", "gb_per_second": 99.0},
        ]},
        "torch 10 GB/s, fused 30 GB/s",
    ),
    "calibration": (
        {"largest_fit_error": {"forward": 0.01, "backward": 0.02}, "shared_link": {"gpus_per_link": 2},
         "link_gb_per_second": {"each_of_both": 40.0}},
        "link 40.0 GB/s, 2 GPUs per link, fit 2.0%",
    ),
    "activations_128k": (
        {"rows": [
            {"num_tokens": 8, "host_budget_gb": 1.0, "arm": "full recompute", "step_seconds": 1.0},
            {"num_tokens": 9, "host_budget_gb": 1.0, "arm": "none", "error": "out of memory"},
            {"num_tokens": 9, "host_budget_gb": 1.0, "arm": "full recompute", "step_seconds": 6.0},
            {"num_tokens": 9, "host_budget_gb": 1.0, "arm": "priced", "step_seconds": 5.0},
        ]},
        "priced 1.200x",
    ),
    "training": ({"tokens_per_second": 12345.6, "tflops_per_gpu": 300.5}, "12,346 tokens/s, 300.5 TFLOP/s"),
    "slices": ({"split_overhead": {"a": -0.01, "b": 0.024}}, "overhead of slices +2.4% at worst"),
    "moe": (
        {"balanced": {"overhead": 0.0123}, "busy": {"speedup": 1.5}},
        "slots +1.2 % when balanced, busy rank 1.50x as fast with replicas",
    ),
    "memory_plan": (
        {"rows": [{"arm": "plan", "peak_reserved_gb": 50.0}, {"arm": "default", "error": "x"}]}, "plan 50.0 GB",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADLINES)
def test_headlines(name: str) -> None:
    figures, expected = HEADLINES[name]
    command = next(command for command in gpu_commands(70.0) if command.name == name)
    assert command.headline(figures) == expected
