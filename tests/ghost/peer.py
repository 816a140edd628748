"""One rank of a file of Megatron's own unit tests on ghost GPUs, for ``tests/ghost/peer_tests.py``.

Megatron's tests are the package ``tests``, like ours. Both are found, because their folder becomes a second path of our
package. Nothing is downloaded: the fixture that asks for data sets finds none.
"""

from __future__ import annotations

import json
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

DOWNLOADS = "tests.test_utils.python_scripts.download_unit_tests_dataset"
TEST_SECONDS = 60


@dataclass(frozen=True)
class PeerFile:
    """One file of tests, run by some ranks.

    Attributes:
        tree: source tree of Megatron.
        path: path of the file in the tree.
        num_ranks: number of ranks.
        launch: name of the launch line whose patch rows are installed, or "" for none.
        port: free port of this host, where the ranks meet.
    """

    tree: Path
    path: str
    num_ranks: int
    launch: str
    port: int


class Recorder:
    """Plugin of pytest that writes one line of JSON for each test when it is known, begins and ends."""

    def __init__(self, file: Path) -> None:
        self._lines = file.open("w", buffering=1)

    def _write(self, **line: object) -> None:
        self._lines.write(json.dumps(line) + "\n")

    def refuse(self, path: str, reason: str) -> None:
        """Write that a file cannot run."""
        self._write(test=path, outcome="failed", reason=reason)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Write the names of all tests."""
        self._write(tests=[item.nodeid for item in items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write that a test begins."""
        self._write(test=nodeid, outcome="began")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the outcome of a test, or of its fixtures if they failed."""
        if report.when == "call" or report.outcome != "passed":
            self._write(test=report.nodeid, outcome=report.outcome, reason=reason_of(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write why a file has no tests."""
        if report.outcome != "passed":
            self._write(test=report.nodeid, outcome=report.outcome, reason=reason_of(report))


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the last line of an error, or the reason of a skipped test."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else str(crash.message)
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return (lines[0] if crash is not None else lines[-1])[:300] if lines else ""


def run_as_rank(job: PeerFile, rank: int, folder: Path) -> None:
    """Run a file as one rank. Writes ``rank<n>.jsonl`` and ``rank<n>.log`` to ``folder``; ends the process."""
    import torch

    from tests.ghost.patched import LAUNCHES, install_rows

    os.setpgid(0, 0)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.num_ranks), LOCAL_WORLD_SIZE=str(job.num_ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port), CUDA_DEVICE_MAX_CONNECTIONS="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    os.chdir(job.tree)
    sys.path.insert(0, str(job.tree))
    sys.modules["tests"].__path__.append(str(job.tree / "tests"))
    nothing = types.ModuleType(DOWNLOADS)
    nothing.download_and_extract_asset = lambda assets_dir: False  # type: ignore[attr-defined]
    sys.modules[DOWNLOADS] = nothing
    torch.set_num_threads(1)
    recorder = Recorder(folder / f"rank{rank}.jsonl")
    if job.launch:
        try:
            install_rows(LAUNCHES[job.launch])
        except ValueError as error:
            recorder.refuse(job.path, f"the rows cannot be installed: {error}")
            os._exit(1)
    words = [
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        f"--timeout={TEST_SECONDS}",
        "--tb=short",
        "-W",
        "ignore",
    ]
    code = pytest.main([*words, job.path], plugins=[recorder])
    sys.stdout.flush()
    os._exit(int(code))  # groups that a test left behind may hang in a normal exit
