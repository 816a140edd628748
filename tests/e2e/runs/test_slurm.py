"""SLURM script in a real queue: after any end of a job, the next job continues, and every document is used once."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.corpora import LENGTHS, VOCAB, documents

ROOT = Path(__file__).resolve().parents[3]
PATH = f"{os.environ['PATH']}:/usr/sbin"
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name, path=PATH)]

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}; Debian: apt-get install slurm-wlm munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
]
SIZES = {
    "LAYERS": "1", "HIDDEN": "32", "FFN": "48", "HEADS": "4", "KV_HEADS": "2", "SEQ_LENGTH": "256", "BATCH": "4",
    "TOKENS_PER_RANK": "256", "ITERS": "100000", "TOKENIZER": f"--tokenizer-type NullTokenizer --vocab-size {VOCAB}",
    "OMP_NUM_THREADS": "1", "RENDEZVOUS": "localhost",
}  # fmt: skip
FLAGS = "--cpu --ckpt-format torch --num-workers 0 --split 100,0,0 --eval-iters 0".split()
COPIES = 5
SAMPLES = COPIES * sum(-(-length // int(SIZES["SEQ_LENGTH"])) for length in LENGTHS)  # of an epoch
ENDS = ("COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL", "TIMEOUT")
SECONDS = 900.0  # a queue on a busy machine
# The repository of the jobs has an entry that records the documents of each step and may kill its rank in step 4.
ENTRY = f"""
import contextlib, os, signal, sys
sys.path[0] = {str(ROOT)!r}
from tests.e2e.training import print_step, train_with

def note(runtime, model):
    steps = runtime.hdp.log_dir / "steps.txt"
    with open(steps, "a") as file, contextlib.redirect_stdout(file):
        print_step(runtime, model)
    kill = os.environ.get("KILLED_TASK", "none") == os.environ.get("SLURM_ARRAY_TASK_ID")
    if kill and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and runtime.step.batch.step_index + 1 == 4:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    train_with(note)
"""


def wait_for(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@dataclass(frozen=True)
class Run:
    """Files of the jobs of one output folder."""

    out: Path

    def steps(self) -> list[dict[str, Any]]:
        """Return the records of all steps and ranks, in order of time."""
        file = self.out / "steps.txt"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in re.findall(r"^RECORD (.*)\n", text, re.MULTILINE)]

    def saved(self) -> int:
        """Return the iteration of the last checkpoint, 0 if there is none."""
        tracker = self.out / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def wait_until_it_goes_on(self, after: int) -> None:
        """Wait for two steps beyond the first ``after`` records; check that they follow the checkpoint."""
        saved = self.saved()
        wait_for(lambda: len(self.steps()) > after and self.steps()[-1]["iteration"] >= saved + 2, "no training")
        assert self.steps()[after]["iteration"] == saved + 1

    def check_documents(self) -> None:
        """Check that each step up to the checkpoint had its documents, each of them once in an epoch."""
        by_step: dict[int, dict[str, str]] = {}
        for record in self.steps():
            found = by_step.setdefault(record["iteration"], {})
            assert all(found.get(seq, name) == name for seq, name in record["documents"].items())
            found.update(record["documents"])
        assert sorted(by_step) == list(range(1, self.saved() + 1))
        assert {len(found) for found in by_step.values()} == {int(SIZES["BATCH"])}
        counts = Counter(name for found in by_step.values() for name in found.values())
        epochs = counts.total() / SAMPLES
        assert len(counts) == min(counts.total(), SAMPLES)
        assert set(counts.values()) <= {math.floor(epochs), math.ceil(epochs)}


@dataclass(frozen=True)
class Queue:
    """A SLURM cluster of two nodes. ``environment``: variables of its commands and jobs."""

    environment: dict[str, str]
    cluster: Path
    folder: Path

    def run(self, *command: str, **variables: str) -> str:
        """Return the output of a command that must succeed."""
        done = subprocess.run(
            command, cwd=self.folder, env={**self.environment, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, out: Path, *options: str, flags: Sequence[str] = (), **variables: str) -> str:
        """Submit a job of one rank on each node, which writes to ``out``, and return its number."""
        sizes = ("--parsable", "--gpus-per-node=1", "--cpus-per-task=1", "--job-name=one", "--time=60")
        script = str(self.folder / "repository" / "scripts" / "train_slurm.sbatch")
        return self.run("sbatch", *sizes, *options, script, *FLAGS, *flags, OUT=str(out), **variables)

    def state(self, job: str) -> tuple[str, str]:
        """Return (state, exit code) of a job or of a task of an array."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        state, code = re.findall(r"(?:JobState|ExitCode)=(\S+)", shown.splitlines()[0])
        return state, code

    def end_of(self, job: str) -> tuple[str, str]:
        """Return (state, exit code) once the job has ended."""
        wait_for(lambda: self.state(job)[0] in ENDS, f"job {job} has not ended")
        return self.state(job)

    def lose(self, node: str) -> None:
        """Kill all processes of a node, as in a power failure, and tell SLURM, which would notice after minutes."""
        lost = [one for one in psutil.process_iter() if self._is_of(one, node)]
        steps = {one.parent() for one in lost} - {None}
        steps = {one for one in steps if one.name().startswith("slurmstepd")}
        assert steps
        daemon = psutil.Process(int((self.cluster / f"{node}.pid").read_text()))
        for one in [daemon, *steps, *lost]:
            one.kill()
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def _is_of(self, process: psutil.Process, node: str) -> bool:
        try:
            found = process.environ()
        except psutil.Error:
            return False
        return (found.get("SLURMD_NODENAME"), found.get("SLURM_CONF")) == (node, self.environment["SLURM_CONF"])


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    """Return a cluster and a folder to submit jobs from, which contains the repository of the jobs."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "repository").mkdir()
    for name in (".venv", "scripts"):
        (folder / "repository" / name).symlink_to(ROOT / name)
    (folder / "repository" / "pretrain_gpt_hdp.py").write_text(ENTRY)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1] - 3
    cluster = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short path, because of the sockets in it
    script = str(ROOT / "scripts" / "slurm" / "local_cluster.sh")
    variables = {"PATH": PATH, "PORT": str(port), "SLURM_CONF": str(cluster / "slurm.conf"), "HOME": str(folder)}
    started = subprocess.run([script, "start", str(cluster)], env=variables, capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    try:
        yield Queue({**variables, **SIZES, "DATA": str(documents(copies=COPIES))}, cluster, folder)
    finally:
        subprocess.run([script, "stop", str(cluster)], env=variables, check=True)
        shutil.rmtree(cluster)


def test_a_job_that_is_told_to_end_succeeds_and_the_next_goes_on(queue: Queue, tmp_path: Path) -> None:
    run = Run(tmp_path / "out")
    first = queue.submit(run.out, "--nodes=2")
    run.wait_until_it_goes_on(after=0)
    queue.run("scancel", "--signal=TERM", first)
    assert queue.end_of(first) == ("COMPLETED", "0:0"), (run.out / f"slurm-{first}.log").read_text()[-3000:]
    assert len(list((run.out / "ranks" / first).rglob("stdout.log"))) == 2
    run.check_documents()

    end = run.saved() + 2
    second = queue.submit(run.out, "--nodes=1", f"--dependency=afterok:{first}", flags=("--exit-interval", str(end)))
    assert queue.end_of(second) == ("COMPLETED", "0:0"), (run.out / f"slurm-{second}.log").read_text()[-3000:]
    assert [record["iteration"] for record in run.steps()][-2:] == [end - 1, end]
    run.check_documents()
    assert (queue.folder / f"one-{second}.out").read_text() == f"log: {run.out}/slurm-{second}.log\n"


def test_a_job_whose_node_fails_is_queued_again_and_goes_on_until_it_is_cancelled(queue: Queue, tmp_path: Path) -> None:
    run = Run(tmp_path / "out")
    job = queue.submit(run.out, "--nodes=2", flags=("--save-interval", "2"), MAX_RESTARTS="1")
    wait_for(lambda: run.saved() >= 2, f"job {job} does not save")
    queue.lose("node2")
    wait_for(lambda: queue.state(job)[0] == "PENDING", f"job {job} is not queued again")
    records = len(run.steps())
    queue.run("slurmd", "-N", "node2")
    queue.run("scontrol", "update", f"jobid={job}", "starttime=now")  # otherwise after two minutes
    run.wait_until_it_goes_on(after=records)
    queue.run("scancel", job)
    assert queue.end_of(job)[0] == "CANCELLED"
    run.check_documents()


def test_tasks_of_an_array_have_their_own_flags_and_folders(queue: Queue, tmp_path: Path) -> None:
    """The rank of task 1 is killed and started again. Task 2 saves two minutes before its time limit."""
    sweep = tmp_path / "sweep.txt"
    sweep.write_text("--train-iters 6 --save-interval 2\n--lr 1e-3\n")
    settings = {"SWEEP": str(sweep), "MAX_RESTARTS": "1", "KILLED_TASK": "1"}
    array = queue.submit(tmp_path / "out", "--nodes=1", "--array=1-2", **settings)
    killed, limited = (Run(tmp_path / "out" / str(task)) for task in (1, 2))
    limited.wait_until_it_goes_on(after=0)
    queue.run("scontrol", "update", f"jobid={array}_2", "timelimit=2")
    assert [queue.end_of(f"{array}_{task}") for task in (1, 2)] == [("COMPLETED", "0:0")] * 2
    assert [record["iteration"] for record in killed.steps()] == [1, 2, 3, 4, 3, 4, 5, 6]
    killed.check_documents()
    limited.check_documents()
