"""The SLURM script in a real queue: a job of two nodes saves on SIGTERM and succeeds; one node goes on after it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.corpora import VOCAB, documents

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
SECONDS = 900.0  # a queue on a busy machine


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables of the commands: a cluster in a folder of its own, and the sizes of a job."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1] - 3
    cluster = Path(tempfile.mkdtemp(prefix="slurm-"))  # short, for the sockets in it
    script = str(ROOT / "scripts" / "slurm" / "local_cluster.sh")
    variables = {"PATH": PATH, "PORT": str(port), "SLURM_CONF": str(cluster / "slurm.conf"), "HOME": str(tmp_path)}
    started = subprocess.run([script, "start", str(cluster)], env=variables, capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    try:
        yield {**variables, **SIZES, "DATA": str(documents(copies=5)), "OUT": str(tmp_path / "out")}
    finally:
        subprocess.run([script, "stop", str(cluster)], env=variables, check=True)
        shutil.rmtree(cluster)


def wait_for(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def test_a_job_that_is_told_to_end_succeeds_and_the_next_goes_on(environment: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(*options: str, flags: tuple[str, ...] = ()) -> str:
        sizes = ("--gpus-per-node=1", "--cpus-per-task=1", "--job-name=one", "--time=60")
        script = str(ROOT / "scripts" / "train_slurm.sbatch")
        on_cpu = ("--cpu", "--ckpt-format", "torch", "--num-workers", "0")
        return run("sbatch", "--parsable", *sizes, *options, script, *on_cpu, *flags)

    def end_of(job: str) -> tuple[str, str]:
        """Return (state, exit code) once the job has ended."""
        found: list[str] = []

        def has_ended() -> bool:
            found[:] = re.findall(r"(?:JobState|ExitCode)=(\S+)", run("scontrol", "--oneliner", "show", "job", job))
            return found[0] not in ("PENDING", "RUNNING", "COMPLETING")

        wait_for(has_ended, f"job {job} has not ended")
        return found[0], found[1]

    def iterations() -> list[int]:
        metrics = out / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line)["iteration"] for line in lines if line.endswith("\n")]

    first = submit("--nodes=2")
    wait_for(lambda: len(iterations()) >= 2, f"job {first} does not train")
    run("scancel", "--signal=TERM", first)
    log = out / f"slurm-{first}.log"
    assert end_of(first) == ("COMPLETED", "0:0"), log.read_text()[-3000:]
    saved = int((out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert iterations()[-1] == saved
    assert len(list((out / "ranks" / first).rglob("stdout.log"))) == 2

    second = submit("--nodes=1", f"--dependency=afterok:{first}", flags=("--exit-interval", str(saved + 2)))
    assert end_of(second) == ("COMPLETED", "0:0"), (out / f"slurm-{second}.log").read_text()[-3000:]
    assert iterations()[-2:] == [saved + 1, saved + 2]
    assert (elsewhere / f"one-{second}.out").read_text() == f"log: {out}/slurm-{second}.log\n"
