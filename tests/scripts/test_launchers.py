"""The launchers: clean shell, sound defaults, arguments passed on, exit codes, and a torchrun on each node."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.scripts.launchers import LOCAL, SHELL_FILES, SLURM, run

EXTRA = ["--lr", "1e-3", "--data-cache-path", "a b"]
ENTRY = "pretrain_gpt_hdp.py"


def parse_as_training_does(rank: int, world: int, words: list[str], num_ranks: int) -> tuple[Any, ...]:
    """Resolve flags like ``pretrain_gpt_hdp.py``, in a separate process."""
    os.environ.update(WORLD_SIZE=str(num_ranks))
    sys.argv = [ENTRY, *words]
    from megatron.bytescale.arguments.parse import parse
    from megatron.bytescale.arguments.resolve import resolve

    args = parse(sys.argv, on_cpu=True)
    cluster = resolve(args).cluster
    return cluster.num_ranks, cluster.tokens_per_rank, args.lr, args.data_cache_path, args.load == args.save


def parsed(words: list[str], num_ranks: int) -> tuple[Any, ...]:
    return tuple(run_ranks(parse_as_training_does, 1, words, num_ranks, init_group=False)[0])


def after_entry(words: list[str]) -> list[str]:
    """Return the flags of the training script in a launch command."""
    place = [Path(word).name for word in words].index(ENTRY)
    return words[place + 1 :]


@pytest.mark.ranks
@pytest.mark.parametrize("script", SHELL_FILES, ids=lambda path: path.name)
def test_shell_is_clean(script: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "shellcheck is one of the pinned dependencies: run make setup"
    done = run([shellcheck, script])
    assert done.returncode == 0, done.stdout
    assert run(["bash", "-n", script]).returncode == 0
    assert "set -euo pipefail" in script.read_text()
    assert os.access(script, os.X_OK)


def dry_run(checkout: Path, *arguments: str, **variables: str) -> list[str]:
    done = run([checkout / "scripts" / LOCAL.name, *arguments], DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


@pytest.mark.ranks
def test_local_prints_its_command_and_runs_nothing(checkout: Path) -> None:
    words = dry_run(checkout, *EXTRA, GPUS="0", FAKE="touch ran")
    assert words[:4] == [str(checkout / ".venv" / "bin" / "python"), "-P", "-m", "megatron.bytescale.launch"]
    assert "--nproc-per-node=4" in words
    assert words[-len(EXTRA) :] == EXTRA
    assert "--cpu" in words
    assert "--bf16" not in words
    assert not (checkout / "runs").exists()


@pytest.mark.ranks
def test_local_uses_every_gpu(checkout: Path) -> None:
    words = dry_run(checkout, GPUS="8")
    assert "--nproc-per-node=8" in words
    assert "--bf16" in words
    assert "--cpu" not in words


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("variables", "expected"), [({}, (4, 8192)), ({"RANKS": "1"}, (1, 32768)), ({"SEQ_LENGTH": "65538"}, (4, 16385))]
)
def test_local_defaults_are_sound(
    variables: dict[str, str], expected: tuple[int, int], checkout: Path, tmp_path: Path
) -> None:
    words = dry_run(checkout, *EXTRA, GPUS="0", OUT=str(tmp_path / "out"), **variables)
    assert parsed(after_entry(words), expected[0]) == (*expected, 1e-3, "a b", True)


@pytest.mark.ranks
@pytest.mark.parametrize("script", [LOCAL, LOCAL.parent / "recipes" / "upcycle_dts.sh"], ids=lambda path: path.name)
def test_values_in_errors_are_printable(script: Path, tmp_path: Path) -> None:
    """A terminal would obey escape sequences."""
    done = run(["bash", script], DATA="no\x1b[31m\ndata", STEPS="\x1b[31m\n", GPUS="0", OUT=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.strip().isprintable()
    assert "?[31m?" in done.stderr


@pytest.mark.ranks
def test_local_takes_its_values_from_variables(checkout: Path, tmp_path: Path) -> None:
    values = {
        "LAYERS": "3", "HIDDEN": "96", "FFN": "97", "HEADS": "6", "KV_HEADS": "2", "DATA": "/a b/c", "SEQ_LENGTH": "99",
        "TOKENS_PER_RANK": "51", "BATCH": "10", "ITERS": "7", "OUT": str(tmp_path / "o p"),
    }  # fmt: skip
    words = dry_run(checkout, GPUS="0", RANKS="2", TOKENIZER="--tokenizer-type SomeTokenizer", **values)
    flags = dict(itertools.pairwise(words))
    expected = {
        "--num-layers": "3", "--hidden-size": "96", "--ffn-hidden-size": "97", "--num-attention-heads": "6",
        "--num-query-groups": "2", "--data-path": "/a b/c", "--seq-length": "99", "--hdp-tokens-per-rank": "51",
        "--global-batch-size": "10", "--train-iters": "7", "--hdp-log-dir": values["OUT"],
        "--save": values["OUT"] + "/checkpoints", "--load": values["OUT"] + "/checkpoints",
        "--tokenizer-type": "SomeTokenizer",
    }  # fmt: skip
    assert {name: flags.get(name) for name in expected} == expected
    assert "--nproc-per-node=2" in words


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fake", "code"),
    [
        ("echo fine", 0),
        ("echo 'pretrain_gpt_hdp.py: error: no data' >&2; exit 1", 2),
        ("echo 'RuntimeError: a rank has died'; exit 1", 1),
        ("echo 'the page pretrain_gpt_hdp.py: error: is a quotation'; exit 1", 1),
        ("exit 9", 9),
    ],
)
def test_local_ends_with_the_right_code(fake: str, code: int, checkout: Path) -> None:
    out = checkout / "out"
    done = run([checkout / "scripts" / LOCAL.name], GPUS="0", OUT=str(out), FAKE=fake)
    assert done.returncode == code, done.stdout + done.stderr
    (log,) = out.glob("train-*.log")
    assert log.read_text() == done.stdout
    assert done.stderr == ("pretrain_gpt_hdp.py: error: no data\n" if code == 2 else "")
    assert log.read_text().startswith("threads 1\n")


@pytest.mark.ranks
def test_local_waits_for_the_end_of_training_on_sigterm(checkout: Path) -> None:
    out = checkout / "out"
    fake = "trap 'sleep 0.5; echo saved; exit 3' TERM; echo ready; while true; do sleep 0.05; done"
    environment = {"PATH": os.environ["PATH"], "GPUS": "0", "OUT": str(out), "FAKE": fake}
    process = subprocess.Popen(
        [checkout / "scripts" / LOCAL.name], env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 30
        while not any("ready" in log.read_text() for log in out.glob("train-*.log")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=400) == 3
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    (log,) = out.glob("train-*.log")
    assert log.read_text().endswith("saved\n")


def test_slurm_has_the_directives_it_needs() -> None:
    lines = SLURM.read_text().splitlines()
    first_command = lines.index("set -euo pipefail")
    directives = [line.removeprefix("#SBATCH ") for line in lines[:first_command] if line.startswith("#SBATCH ")]
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:]), "SLURM reads none after a command"
    names = {directive.partition("=")[0] for directive in directives}
    assert {"--nodes", "--gpus-per-node", "--cpus-per-task", "--time", "--output", "--requeue"} <= names
    assert {"--ntasks-per-node=1", "--signal=TERM@120"} <= set(directives)


@pytest.mark.ranks
def test_slurm_starts_one_torchrun_per_node(slurm_job: tuple[Path, dict[str, str]], checkout: Path) -> None:
    script, environment = slurm_job
    done = run(["bash", script, *EXTRA], **environment)
    assert done.returncode == 0, done.stderr
    log = checkout / "runs" / "a-job" / "slurm-1234567.log"
    assert done.stdout == f"log: {log}\n"
    resources, launch_line = log.read_text().splitlines()
    assert resources.split() == ["8", "64"]
    words = shlex.split(launch_line)
    launch = words[: -len(after_entry(words))]
    assert words[1:5] == [str(checkout / ".venv" / "bin" / "python"), "-P", "-m", "megatron.bytescale.launch"]
    assert {"--nnodes=3", "--nproc-per-node=8", "--rdzv-backend=c10d"} <= set(launch)
    (rendezvous_id,) = (word for word in launch if word.startswith("--rdzv-id="))
    assert re.fullmatch(r"--rdzv-id=1234567-[0-9a-f]{32}", rendezvous_id)  # nobody can guess it
    assert "--rdzv-endpoint=node7:24567" in launch
    assert launch[-1] == str(checkout / ENTRY)
    assert "--exit-signal-handler" in words
    assert words[-len(EXTRA) :] == EXTRA
    assert (checkout / "runs" / "a-job").is_dir()
    assert parsed(after_entry(words), 24)[:2] == (24, 8192)


@pytest.mark.ranks
def test_slurm_needs_the_processors_of_a_task(slurm_job: tuple[Path, dict[str, str]]) -> None:
    script, environment = slurm_job
    del environment["SLURM_CPUS_PER_TASK"]
    done = run(["bash", script], **environment)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--cpus-per-task" in done.stderr


@pytest.mark.ranks
def test_slurm_gives_each_task_of_an_array_its_flags_and_its_folder(
    slurm_job: tuple[Path, dict[str, str]], checkout: Path
) -> None:
    script, environment = slurm_job
    (checkout / "sweep").write_text("--lr 1e-4 --seed 5\n\n--lr 1e-5")
    environment |= {"SWEEP": str(checkout / "sweep"), "OUT": str(checkout / "out")}
    for task, flags in {1: ["--lr", "1e-4", "--seed", "5"], 2: [], 3: ["--lr", "1e-5"]}.items():
        done = run(["bash", script, *EXTRA], **environment, SLURM_ARRAY_TASK_ID=str(task))
        log = checkout / "out" / str(task) / "slurm-1234567.log"
        assert done.stdout == f"log: {log}\n"
        words = shlex.split(log.read_text().splitlines()[1])
        assert words[-len(EXTRA + flags) :] == EXTRA + flags
        assert words[words.index("--save") + 1] == str(checkout / "out" / str(task) / "checkpoints")
    for task in (0, 4):
        done = run(["bash", script], **environment, SLURM_ARRAY_TASK_ID=str(task))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"sweep has no line {task}; lines count from 1" in done.stderr


@pytest.mark.ranks
@pytest.mark.parametrize("space", [" ", "\n"], ids=["space", "newline"])
def test_slurm_finds_a_checkout_in_a_folder_with_spaces(
    space: str, slurm_job: tuple[Path, dict[str, str]], checkout: Path
) -> None:
    """The path of the script ended at its first space or newline, so that another folder's files ran."""
    script, environment = slurm_job
    spaced = checkout / f"proj{space}x"
    spaced.mkdir()
    for name in ("scripts", ".venv", "data"):
        shutil.copytree(checkout / name, spaced / name)
    scontrol = checkout / "slurm" / "scontrol"
    scontrol.write_text(scontrol.read_text().replace(f"Command={checkout}/", f"Command={spaced}/"))
    done = run(["bash", script, *EXTRA], **environment)
    assert done.returncode == 0, done.stderr
    shown = str(spaced).replace("\n", "?")
    assert done.stdout == f"log: {shown}/runs/a-job/slurm-1234567.log\n"
