"""Programs on an emulated cluster: who they find there, how fast they may be, and what is left afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.cluster.emulate import QuotaGroups, check_machine, main, parse
from scripts.cluster.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
NAME = "bstest"
PROGRAM = """
import os, socket, sys
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(address)
    found = sorted(server.accept()[0].getpeername()[0] for _ in range(world - 1))
    print("found", *found)
else:
    for _ in range(600):
        try:
            socket.create_connection(address, timeout=400)
            break
        except OSError:
            __import__("time").sleep(0.1)
if len(sys.argv) > 1 and rank == 1:
    sys.exit(int(sys.argv[1]))
"""


def lacks() -> str:
    """Return why no cluster can be emulated here; empty where one can."""
    try:
        check_machine(Topology(1, 1))
        QuotaGroups(NAME, 1)
        probe = subprocess.run(["ip", "netns", "add", f"{NAME}-probe"], capture_output=True, text=True)
        if probe.returncode:
            return f"no network namespaces: {probe.stderr.strip()}"
        subprocess.run(["ip", "netns", "delete", f"{NAME}-probe"], check=True)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


LACKS = lacks()


def needs_cluster(test: Callable[..., None]) -> Callable[..., None]:
    """Skip a test where no cluster can be emulated."""
    return pytest.mark.skipif(bool(LACKS), reason=LACKS or "a cluster can be emulated")(test)


def leftovers() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    spaces = [line.split()[0] for line in listed if line.startswith(NAME)]
    groups = [path for root in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup") for path in Path(root).glob(NAME)]
    return [*spaces, *map(str, groups)]


def emulate(tmp_path: Path, *words: object, program: str = PROGRAM) -> int:
    script = tmp_path / "program.py"
    script.write_text(program)
    shape = ("--nodes", 2, "--ranks-per-node", 2, "--cores-per-rank", 0.2, "--name", NAME, "--quota-after", "")
    return main([*map(str, (*shape, "--log-dir", tmp_path / "logs", "--timeout", 120, "--", script, *words))])


@pytest.mark.ranks
@needs_cluster
def test_ranks_meet_on_the_emulated_network_and_nothing_is_left(tmp_path: Path) -> None:
    assert emulate(tmp_path) == 0
    assert (tmp_path / "logs" / "rank0.log").read_text() == "found 10.77.0.2 10.77.1.1 10.77.1.2\n"
    assert leftovers() == []


@pytest.mark.ranks
@needs_cluster
def test_a_rank_that_fails_ends_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waits = PROGRAM + "\nif rank != 1: __import__('time').sleep(3600)\n"
    assert emulate(tmp_path, 7, program=waits) == 1
    assert "exit code 7" in capsys.readouterr().err
    assert leftovers() == []


@pytest.mark.ranks
@needs_cluster
def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    subprocess.run(["ip", "netns", "add", f"{NAME}-17"], check=True)
    groups = QuotaGroups(NAME, 3)
    groups.create()
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    (groups.folders[2] / "cgroup.procs").write_text(str(sleeper.pid))
    assert emulate(tmp_path) == 0
    assert sleeper.wait(timeout=400) == -9
    assert leftovers() == []


@pytest.mark.ranks
@needs_cluster
def test_quotas_are_written(tmp_path: Path) -> None:
    groups = QuotaGroups(NAME, 2)
    groups.create()
    try:
        groups.limit(0.25)
        name = "cpu.cfs_quota_us" if groups.is_v1 else "cpu.max"
        assert {(folder / name).read_text().split()[0] for folder in groups.folders} == {"2500"}
    finally:
        groups.remove()


def test_version_2_groups(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu io memory\n")
    groups = QuotaGroups("bstest", 2, tmp_path)
    groups.create()
    groups.limit(0.5)
    assert [(folder / "cpu.max").read_text() for folder in groups.folders] == ["5000 10000"] * 2
    assert (groups.top / "cgroup.subtree_control").read_text() == "+cpu"


def test_no_control_groups_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no control groups with a cpu controller"):
        QuotaGroups("bstest", 2, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0", "--", __file__], "--nodes 0"),
        (["--", "no_such_file.py"], "no_such_file.py is not a file"),
        (["--nodes", "8", "--ranks-per-node", "99", "--cores-per-rank", "9", "--", __file__], "cores, and there are"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "cores" in said and (os.geteuid() != 0 or shutil.which("tc") is None):
        pytest.skip("another reason comes first")
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="needs root"):
        check_machine(Topology(1, 2))


def test_without_tools_it_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(ValueError, match="ip and tc not found"):
        check_machine(Topology(1, 2))


def test_flags_make_the_cluster() -> None:
    topology, launch = parse(["--nodes", "2", "--inter-gbps", "0.4", "--", __file__, "--flag", "1"])
    assert (topology.num_nodes, topology.inter_gbps, topology.ranks_per_node) == (2, 0.4, 4)
    assert launch.command == (__file__, "--flag", "1")
