"""Programs on an emulated cluster: their network, their end, and the clean-up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.cluster.emulate import check_machine, claimed, main, parse
from scripts.cluster.quotas import QuotaGroups
from scripts.cluster.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
NAME = "bstest" + os.environ.get("PYTEST_XDIST_WORKER", "")  # workers of a test session run at the same time
PROBE = f"probe-{NAME}"
EMULATE = str(ROOT / "scripts" / "cluster" / "emulate.py")
PROGRAM = """
import os, socket, sys
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(address)
    peers = sorted(server.accept()[0].getpeername()[0] for _ in range(world - 1))
    print("peers", *peers)
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
    """Return the reason why this machine cannot emulate a cluster, or an empty text."""
    try:
        check_machine(Topology(1, 1))
        QuotaGroups(NAME, 1)
        probe = subprocess.run(["ip", "netns", "add", PROBE], capture_output=True, text=True)
        if probe.returncode:
            return f"no network namespaces: {probe.stderr.strip()}"
        subprocess.run(["ip", "netns", "delete", PROBE], check=True)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


LACKS = lacks()


def needs_cluster(test: Callable[..., None]) -> Callable[..., None]:
    """Skip a test if this machine cannot emulate a cluster."""
    return pytest.mark.skipif(bool(LACKS), reason=LACKS or "a cluster can be emulated")(test)


def leftovers() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    spaces = [line.split()[0] for line in listed if line.startswith(NAME)]
    groups = [path for root in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup") for path in Path(root).glob(NAME)]
    return [*spaces, *map(str, groups)]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 400
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def emulate(tmp_path: Path, *words: object, program: str = PROGRAM) -> int:
    script = tmp_path / "program.py"
    script.write_text(program)
    shape = ("--nodes", 2, "--ranks-per-node", 2, "--cores-per-rank", 0.2, "--name", NAME, "--quota-after", "")
    return main([*map(str, (*shape, "--log-dir", tmp_path / "logs", "--timeout", 120, "--", script, *words))])


@pytest.mark.ranks
@needs_cluster
def test_ranks_connect_over_the_emulated_network(tmp_path: Path) -> None:
    assert emulate(tmp_path) == 0
    assert (tmp_path / "logs" / "rank0.log").read_text() == "peers 10.77.0.2 10.77.1.1 10.77.1.2\n"
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
def test_leftovers_of_a_killed_run_are_removed_by_the_next(tmp_path: Path) -> None:
    script, ready = tmp_path / "sleeps.py", tmp_path / "logs" / "rank1.log"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(3600)\n")
    words = ["--ranks-per-node", "2", "--name", NAME, "--quota-after", "", "--log-dir", str(ready.parent), "--"]
    tool = subprocess.Popen([sys.executable, EMULATE, *words, str(script)])
    try:
        wait_for(lambda: ready.exists() and "ready" in ready.read_text())
        assert main([*words, str(script)]) == 2, "the name is in use"
    finally:
        tool.kill()
        tool.wait()
    assert len(leftovers()) == 4
    assert emulate(tmp_path) == 0
    assert leftovers() == []


@pytest.mark.ranks
@needs_cluster
def test_sigterm_removes_everything(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text("import os, signal, time\nos.kill(int(os.environ['TOOL']), signal.SIGTERM)\ntime.sleep(3600)\n")
    words = ["--ranks-per-node", "1", "--name", NAME, "--quota-after", "", "--log-dir", str(tmp_path), "--"]
    code = f"import os, sys; os.environ['TOOL'] = str(os.getpid()); sys.path.insert(0, {str(ROOT)!r})\n"
    code += f"from scripts.cluster.emulate import main\nsys.exit(main({[*words, str(script)]!r}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 143
    assert leftovers() == []


@pytest.mark.ranks
@needs_cluster
def test_foreign_namespaces_are_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["ip", "netns", "add", f"{NAME}-17"], check=True)
    try:
        assert emulate(tmp_path) == 2
        assert f"{NAME}-17 exists and does not belong to an emulated cluster" in capsys.readouterr().err
        assert leftovers() == [f"{NAME}-17"]
    finally:
        subprocess.run(["ip", "netns", "delete", f"{NAME}-17"], check=True)


@pytest.mark.ranks
@needs_cluster
def test_a_program_that_never_prints_its_text_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "silent.py"
    script.write_text("")
    words = ["--ranks-per-node", "1", "--name", NAME, "--quota-after", "begins", "--log-dir", str(tmp_path)]
    assert main([*words, "--", str(script)]) == 2
    assert "rank 0 never printed 'begins'" in capsys.readouterr().err
    assert leftovers() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0", "--", EMULATE], "--nodes 0"),
        (["--nodes", "201", "--", EMULATE], "--nodes 201"),
        (["--inter-gbps", "-1", "--", EMULATE], "must not be negative"),
        (["--cores-per-rank", "0", "--", EMULATE], "--cores-per-rank 0 must be positive"),
        (["--name", "a b", "--", EMULATE], "--name a b"),
        (["--timeout", "0", "--", EMULATE], "--timeout 0 must be positive"),
        (["--", "no_such_file.py"], "no_such_file.py is not a file"),
        (["--", sys.executable], "is not a program of this project"),
        (["--spec", "H200-IB", "--", EMULATE], "--spec needs --cost-file"),
        (["--cost-file", EMULATE, "--", EMULATE], "--cost-file needs --spec"),
        (["--spec", "H200-IB", "--cost-file", EMULATE, "--", EMULATE], "is not JSON"),
        (["--spec", "H200-IB", "--inter-gbps", "1", "--", EMULATE], "--spec sets the links"),
        (["--nodes", "8", "--ranks-per-node", "99", "--cores-per-rank", "9", "--", EMULATE], "cores, and there are"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "cores" in message and (os.geteuid() != 0 or shutil.which("tc") is None):
        pytest.skip("another reason comes first")
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_a_name_is_held_by_one_process(tmp_path: Path) -> None:
    with claimed("mine", tmp_path) as was_left:
        assert not was_left
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "emulated-cluster-mine.lock").touch()
    with claimed("mine", tmp_path) as was_left:
        assert was_left


def test_root_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="needs root"):
        check_machine(Topology(1, 2))


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(ValueError, match="ip and tc not found"):
        check_machine(Topology(1, 2))


def test_flags_make_the_cluster() -> None:
    topology, launch = parse(["--nodes", "2", "--inter-gbps", "0.4", "--", __file__, "--flag", "1"])
    assert (topology.num_nodes, topology.inter_gbps, topology.ranks_per_node) == (2, 0.4, 4)
    assert launch.command == (__file__, "--flag", "1")
