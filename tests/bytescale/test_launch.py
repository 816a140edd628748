"""torchrun with exit codes for job scripts: real torchrun with a small script as rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.launcher import api

from megatron.bytescale.launch import TRACKER, LaunchProgress, follow_ranks, value_of
from tests.harness import free_port

RANK = """
import os, pathlib, signal, sys, time
folder, saves, code = pathlib.Path(sys.argv[1]), sys.argv[2] == "saves", int(sys.argv[3])
assert os.environ["MASTER_ADDR"] == "127.0.0.1"
def end(*_):
    if saves:
        (folder / "latest_checkpointed_iteration.txt").write_text("12")
    sys.exit(0)
if code and os.environ["LOCAL_RANK"] == "0":
    print("pretrain_gpt_hdp.py: error: why", file=sys.stderr)
    sys.exit(code)
signal.signal(signal.SIGTERM, signal.SIG_IGN if code else end)
if "trains" in sys.argv:
    (folder / "metrics.jsonl").write_text("{}\\n")
(folder / "ready").write_text("")
time.sleep(600)
"""


def launched(folder: Path, *words: str, ranks: int = 1) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "megatron.bytescale.launch", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--shutdown-timeout=60", "--max-restarts=2", str(folder / "rank.py"), str(folder), *words]
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        [*command, "--save", str(folder), f"--hdp-log-dir={folder}"],
        env={**os.environ, "PYTHONPATH": root}, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def ended_on_sigterm(folder: Path, *words: str) -> tuple[int, str]:
    process = launched(folder, *words)
    try:
        deadline = time.monotonic() + 300
        while not (folder / "ready").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, errors


@pytest.mark.ranks
def test_a_save_on_sigterm_is_a_success(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("7")
    code, errors = ended_on_sigterm(tmp_path, "saves", "0", "trains")
    assert code == 0, errors
    assert errors.splitlines()[-1] == (
        f"bytescale launch: ended on SIGTERM with the checkpoint of iteration 12 in {tmp_path}"
    )
    assert "Traceback" not in errors


@pytest.mark.full
@pytest.mark.ranks
def test_bad_input_of_a_rank_is_exit_code_2_and_is_not_tried_again(tmp_path: Path) -> None:
    """The other rank waits and ignores SIGTERM, so torchrun would wait for 30 s."""
    process = launched(tmp_path, "saves", "2", ranks=2)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert errors.count("pretrain_gpt_hdp.py: error: why\n") == 1
    assert "Traceback" not in errors
    assert "Unable to shutdown" not in errors


TORCHRUN = "torchrun refuses its arguments: "
NO_RANKS = [
    ("--nproc-per-node=many", 2, f"{TORCHRUN}Unsupported nproc_per_node value: many"),
    ("--nproc-per-node=0", 2, f"{TORCHRUN}--nproc-per-node and --monitor-interval must be positive"),
    ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:x", 2,
     f"{TORCHRUN}The port number of the rendezvous endpoint 'localhost:x' must be an integer between 0 and 65536."),
    ("--nnodes=2 --rdzv-conf=a", 2, f"{TORCHRUN}The rendezvous configuration option 'a' must have a value specified."),
    ("--local-addr=999.1.1.1", 2, f"{TORCHRUN}this machine has no address towards 999.1.1.1"),
    ("--standalone --no-python", 2, f"{TORCHRUN}[Errno 2] No such file or directory: 'rank.py'"),
    ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:PORT --rdzv-conf=join_timeout=1", 1,
     "not all nodes came in time; --rdzv-conf join_timeout=SECONDS waits longer"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize(("words", "code", "line"), NO_RANKS)
def test_torchrun_refuses_in_one_line(words: str, code: int, line: str, tmp_path: Path) -> None:
    given = words.replace("PORT", str(free_port())).split()
    command = [sys.executable, "-P", "-m", "megatron.bytescale.launch", *given, "rank.py"]
    root = str(Path(__file__).resolve().parents[2])
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.splitlines()[-1] == f"bytescale launch: error: {line}"
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("code", "restarts"), [(2, 0), (1, 3)])
def test_a_rank_that_has_died_is_started_again_and_saves_nothing(
    code: int, restarts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Agent:
        _remaining_restarts = 3
        _pcontext = SimpleNamespace(subprocess_handlers={})

        def _monitor_workers(self, worker_group: object) -> RunResult:
            return RunResult(WorkerState.FAILED, failures={0: SimpleNamespace(exitcode=code)})

    monkeypatch.setattr(api, "LocalElasticAgent", Agent)
    (tmp_path / TRACKER).write_text("7")
    progress = LaunchProgress.of(["--save", str(tmp_path)])
    follow_ranks(progress)
    agent = api.LocalElasticAgent()
    agent._monitor_workers(None)
    assert agent._remaining_restarts == restarts
    progress.at_signal = progress.state()
    assert progress.ended() == (1, f"error: ended on SIGTERM after a rank had died; {tmp_path} has the last checkpoint")


def test_before_the_first_iteration_there_is_nothing_to_save(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("an earlier run\n")
    progress = LaunchProgress.of(["--save", str(tmp_path), "--hdp-log-dir", str(tmp_path)])
    assert progress.ended() == (0, "ended on SIGTERM before the first iteration; there was nothing to save")


def test_a_run_that_has_not_saved_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.bytescale.launch.SECONDS_TO_APPEAR", 0.0)
    (tmp_path / TRACKER).write_text("7")
    for words in (["--save", str(tmp_path)], ["--hdp-log-dir", str(tmp_path)]):
        progress = LaunchProgress.of(words)
        progress.at_signal = progress.state()
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        code, message = progress.ended()
        assert code == 1
        assert message.startswith("error: ended on SIGTERM")


def test_flags_are_read_in_both_spellings() -> None:
    assert value_of(["--save", "a", "--save=b"], "--save") == "b"
    assert value_of(["--save=a", "--save", "b"], "--save") == "b"
    assert value_of(["--load", "a"], "--save") is None
