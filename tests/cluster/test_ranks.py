"""Cold ranks, and warm ranks: forks of a process with all imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.cluster.emulate import run
from scripts.cluster.ranks import Launch, rank_environment
from scripts.cluster.topology import Topology
from tests.cluster.test_emulate import NAME, leftovers, needs_cluster

PROGRAM = """
import os, socket, sys
rank = int(os.environ["RANK"])
print(sys.argv[1:], os.environ["LOCAL_RANK"], len(socket.if_nameindex()), __name__)
sys.exit(rank * int(sys.argv[1]))
"""
PRELOADED = """
import resource, torch
torch.set_num_threads(2)
from scripts.cluster.ranks import preload
preload()
def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 22)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first, *_, last = (new_pages() for _ in range(16))  # the allocator first caches a few small parts
print(torch.get_num_threads(), first, last)
"""


@pytest.mark.ranks
@needs_cluster
@pytest.mark.parametrize("factor", [0, 3])
def test_a_warm_rank_runs_a_script_as_a_program(tmp_path: Path, factor: int) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    launch = Launch((str(script), str(factor)), tmp_path, "", 120.0, is_warm=True)
    (tmp_path / "target").write_text("precious")
    launch.log(0).symlink_to(tmp_path / "target")  # ranks start as root, in a folder that others may share
    assert run(Topology(1, 2, cores_per_rank=0.4, name=NAME), launch).code == factor
    assert launch.log(0).read_text() == f"['{factor}'] 0 2 __main__\n"
    assert (tmp_path / "target").read_text() == "precious"
    assert sys.argv[1:] != [str(factor)], "a fork must not change its parent"
    assert leftovers() == []


@pytest.mark.full
@pytest.mark.ranks
def test_warm_ranks_have_one_thread_and_keep_freed_memory() -> None:
    """Ranks on a shared core must neither wait for threads without a core nor get the same pages in every step."""
    done = subprocess.run([sys.executable, "-c", PRELOADED], capture_output=True, text=True, timeout=120, check=True)
    num_threads, first, last = map(int, done.stdout.split())
    assert num_threads == 1
    assert last < first / 10, "pages of tensors of a freed size"


def test_ranks_have_the_variables_of_torchrun() -> None:
    environment = rank_environment(Topology(2, 3), 4)
    wanted = {"RANK": "4", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "1"}
    assert wanted.items() <= environment.items()
    assert environment["MASTER_ADDR"] == "10.77.0.1"
