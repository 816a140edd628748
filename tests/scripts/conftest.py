"""Launchers in a checkout without Megatron, and fake SLURM commands that print their arguments."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.scripts.launchers import CHECKS, LOCAL, SLURM


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the launchers with a fake Python, whose launch runs the variable FAKE."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for script in (LOCAL, SLURM, CHECKS):
        shutil.copy(script, tmp_path / "scripts")
    (tmp_path / "data").mkdir()
    for name in ("data/python.idx", "data/python.bin", "half.idx", "file"):
        (tmp_path / name).write_text("")
    (tmp_path / "linked" / "nccl").mkdir(parents=True)
    (tmp_path / "linked" / "nccl" / "rank_0").symlink_to(tmp_path / "file")
    python = tmp_path / ".venv" / "bin" / "python"
    # torch sees 2 GPUs
    fake = '[[ "$1 $2" == "-P -c" ]] && { echo 2; exit; }\necho "threads $OMP_NUM_THREADS"\neval "$FAKE"\n'
    python.write_text(f"#!/usr/bin/env bash\n{fake}")
    python.chmod(0o755)
    return tmp_path


@pytest.fixture
def slurm_job(checkout: Path) -> tuple[Path, dict[str, str]]:
    """(script, environment) as in a job of three nodes with eight GPUs each."""
    commands = checkout / "slurm"
    commands.mkdir()
    fakes = {
        "scontrol": '[[ "$*" == "show hostnames node[7-9]" ]] && printf "node7\\nnode8\\nnode9\\n"\n'
        f'[[ "$*" == "show job 1234567" ]] && echo "JobId=1234567\n   Command={checkout}/scripts/{SLURM.name} --lr 1\n'
        '   WorkDir=/"; true',
        "sbatch": '[[ ${SBATCH_PARTITION:-} != none ]] && echo "submitted $*" && exit\n'
        'printf "sbatch: error: %s\\n" "no such partition" "not submitted" >&2; exit 1',
        "srun": 'echo "$OMP_NUM_THREADS $SRUN_CPUS_PER_TASK" >&2; printf "%q " "$@"',
    }
    for name, body in fakes.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (commands / name).chmod(0o755)
    spool = checkout / "spool"  # SLURM runs a copy of the script
    spool.mkdir()
    shutil.copy(checkout / "scripts" / SLURM.name, spool / "slurm_script")
    environment = {
        "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NAME": "a-job", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "node[7-9]",
        "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "64",
    }  # fmt: skip
    return spool / "slurm_script", environment
