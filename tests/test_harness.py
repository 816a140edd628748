"""Multi-rank harness: values, failures, hangs, and no remaining processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import RanksFailed, run_ranks


def sum_of_ranks(rank: int, world: int, start: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return os.getpid(), total


def environment(rank: int, world: int) -> tuple[str, str, bool, int]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], dist.is_initialized(), torch.get_num_threads()


def fail_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("the reason")
    dist.barrier()


def die_on_two(rank: int, world: int, folder: str) -> int:
    dist.barrier()
    Path(folder, str(rank)).touch()
    if rank == 2:
        while len(os.listdir(folder)) < world:  # in the barrier, another rank would fail with this rank
            time.sleep(0.01)
        os._exit(7)
    return rank


def hang_on_zero(rank: int, world: int, pid_file: str) -> None:
    if rank == 0:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(pid_file, "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        wait_for_ever()


def wait_for_ever() -> None:
    while True:
        time.sleep(1)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.ranks
def test_values_come_back_by_rank() -> None:
    results = run_ranks(sum_of_ranks, 3, 10)
    assert [int(total) for _, total in results] == [33, 33, 33]
    assert len({pid for pid, _ in results}) == 3


@pytest.mark.ranks
def test_environment_of_a_rank() -> None:
    assert run_ranks(environment, 2) == [("0", "2", True, 1), ("1", "2", True, 1)]
    assert [initialized for _, _, initialized, _ in run_ranks(environment, 2, init_group=False)] == [False, False]


@pytest.mark.ranks
def test_first_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RanksFailed, match="rank 1 of 3 failed first") as caught:
        run_ranks(fail_on_one, 3)
    assert caught.value.rank == 1
    assert "KeyError: 'the reason'" in str(caught.value)
    assert "fail_on_one" in str(caught.value)


@pytest.mark.ranks
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with pytest.raises(RanksFailed, match="exit code 7") as caught:
        run_ranks(die_on_two, 3, str(tmp_path / "first"))
    assert caught.value.rank == 2
    assert run_ranks(die_on_two, 3, str(tmp_path / "second"), may_die={2}) == [0, 1, None]


def test_a_test_without_the_mark_cannot_start_ranks() -> None:
    with pytest.raises(RuntimeError, match=r"starts processes without the mark: add @pytest.mark.ranks"):
        run_ranks(environment, 2)


def test_a_test_without_the_mark_cannot_start_python() -> None:
    with pytest.raises(RuntimeError, match=r"starts processes without the mark: add @pytest.mark.ranks"):
        subprocess.run([sys.executable, "-c", ""], check=True)


@pytest.mark.ranks
def test_a_test_with_the_mark_can_start_python() -> None:
    assert subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode == 3


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_hang_is_ended_and_shown(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    began = time.monotonic()
    run_ranks(environment, 2)
    start_seconds = time.monotonic() - began  # on a busy machine, the ranks below start as slowly
    with pytest.raises(TimeoutError, match=r"ranks \[0\b.*did not finish") as caught:
        run_ranks(hang_on_zero, 2, str(pid_file), timeout=3 + 5 * start_seconds)
    assert "wait_for_ever" in str(caught.value)
    deadline = time.monotonic() + 200
    for pid in map(int, pid_file.read_text().split()):
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(pid)
