from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bytescale_ext.measure.cost_file import read_cost
from bytescale_ext.plan.search.costs import parallel_cost, scaled_cost
from bytescale_ext.plan.search.strategy import FULL, Strategy
from megatron.bytescale.cli.search.script import LAUNCHERS, ScriptedRun, script_text, write_costs
from tests.plan.search.tasks import small_task

RUN = ScriptedRun(["--num-layers", "4", "--swiglu"], ["--hdp-tokens-per-rank", "64"], 256, 8, None)


def words(text: str) -> list[str]:
    """Return the words of the command that a script runs."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return shlex.split(" ".join(line.removesuffix("\\") for line in lines))


def test_what_the_user_gave_is_kept() -> None:
    given = ["--hidden-dropout=0.1", "--max-position-embeddings", "512"]
    run = ScriptedRun(given, [], 256, 8, "cost.json")
    assert run.flags() == [*given, "--seq-length", "256", "--global-batch-size", "8"]
    one = ScriptedRun.of("--hidden-dropout=0.1 --swiglu", small_task(), Strategy(2, (6,), 1024), "cost.json")
    assert one.model_flags == ["--hidden-dropout=0.1", "--swiglu", "--attention-dropout", "0", "--bf16"]
    assert (one.seq_length, one.batch) == (4096, 8)
    assert one.flags()[-len(one.strategy_flags) :] == Strategy(2, (6,), 1024).flags()


def test_training_plans_with_the_costs_of_the_search(tmp_path: Path) -> None:
    task = small_task()
    for strategy in (Strategy(1, (6,), 1024), Strategy(2, (6,), 1024, activations=FULL, loss_tokens=64)):
        write_costs(tmp_path / "cost.json", task, strategy)
        cost = read_cost(tmp_path / "cost.json")
        expected = parallel_cost(task.cost, strategy)
        assert cost == replace(expected, source=f"{expected.source}; for {strategy}")
        assert cost.tensor_parallel == strategy.tensor_parallel
    assert cost.backward == scaled_cost(task.cost, task.cost.shape, 2).backward, "training adds what it recomputes"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("devices", [2, 8, 64])
def test_scripts_are_bash(launcher: str, devices: int) -> None:
    text = script_text(RUN, devices, 8, launcher, ["a comment; with 'quotes'"])
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True).stderr == ""
    found = words(text)
    assert found[-1] == "$@"
    assert "megatron.bytescale.train" in found
    assert found[found.index("megatron.bytescale.train") + 1 : -1] == RUN.flags()
    assert f"--nproc-per-node={min(8, devices)}" in found
    assert ("srun" in found) == (launcher == "slurm")
    assert ("--standalone" in found) == (launcher == "torchrun" and devices <= 8)
    assert ("--rdzv-id=" in text) == (launcher == "slurm" or devices > 8)
    assert ("#SBATCH --nodes=8" in text) == (launcher == "slurm" and devices == 64)
    assert "# a comment; with 'quotes'\n" in text


def test_words_with_spaces_are_quoted() -> None:
    run = ScriptedRun(["--tensorboard-dir", "a folder"], ["--pipeline-model-parallel-layout", "Et*3|t*1L"], 8, 8, None)
    text = script_text(run, 1, 8, "torchrun", [])
    assert "--tensorboard-dir 'a folder'" in text
    assert "'Et*3|t*1L'" in text


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_script_and_cost_file_run_from_any_folder(launcher: str, tmp_path: Path) -> None:
    """A copy of both files finds the cost file, also as the copy of the script that SLURM runs."""
    here, other = tmp_path / "a\nnew folder", tmp_path / "spool"
    here.mkdir()
    (tmp_path / "a").mkdir()
    other.mkdir()
    script = here / "launch.sh"
    script.write_text(script_text(replace(RUN, cost_file="the cost.json"), 2, 8, launcher, []))
    run_as = other / "slurm_script"
    run_as.write_text(script.read_text())
    tools = {
        "python": f'echo "$@" > {tmp_path}/words',
        "srun": '"$@"',
        "scontrol": f'[[ $2 == job ]] && echo "JobId=7\n   Command={script} --lr 1\n   WorkDir=/" || echo node1',
    }
    for name, body in tools.items():
        (other / name).write_text(f"#!/bin/bash\n{body}\n")
        (other / name).chmod(0o755)
    environment = {
        "PATH": f"{other}:{os.environ['PATH']}", "PYTHON": "python", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"
    }  # fmt: skip
    for path in [script, run_as] if launcher == "slurm" else [script]:
        subprocess.run(["bash", path, "--lr", "1"], env=environment, cwd="/", check=True)
        words = (tmp_path / "words").read_text()
        assert words.endswith(f"--cost-file {here}/the cost.json --lr 1\n")
