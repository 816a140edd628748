"""Rules for every test: tests leave the process unchanged, and only marked tests start processes."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.bytescale import cpu
from tests import harness, sample
from tests.e2e import once


def pytest_configure(config: pytest.Config) -> None:
    """Make the examples of hypothesis equal in every run, without time limits. `make test` tries a part of them."""
    os.environ[sample.WHOLE] = str(int(not config.option.markexpr))
    torch.set_num_threads(1)  # sums in the same order on every machine
    if importlib.util.find_spec("hypothesis") is not None:  # tests on a GPU run without it
        from hypothesis import settings

        settings.register_profile("steady", deadline=None, derandomize=True, max_examples=sample.examples(100))
        settings.load_profile("steady")
    sys.addaudithook(refuse_interpreters)
    if hasattr(os, "SCHED_BATCH"):
        # With more ranks than cores, a rank that wakes up must not interrupt another rank's send. Children inherit this
        # policy.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu``, read only files named ``test_gpu*.py``, because others import packages beyond Megatron's."""
    asks_for_gpu = str(config.option.markexpr).split(" and ")[0] == "gpu"
    is_other = collection_path.suffix == ".py" and not collection_path.name.startswith("test_gpu")
    return True if asks_for_gpu and is_other and collection_path.name.startswith("test_") else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Import Megatron without ``torch.compile``, which imports the compiler for each fused function.

    On CPU the project does the same (``cpu.py``).
    """
    compiled, torch.compile = torch.compile, cpu._not_compiled
    gc.disable()  # modules and tests live until the end, so garbage collections need not visit them
    try:
        return (yield)
    finally:
        torch.compile = compiled
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first: trainings, then other tests that start processes."""
    items.sort(key=lambda item: (item.get_closest_marker("ranks") is None, not item.nodeid.startswith("tests/e2e/")))


def refuse_interpreters(event: str, arguments: tuple[object, ...]) -> None:
    """Raise RuntimeError if a test without the mark starts Python. This is an audit hook of the interpreter."""
    if event == "subprocess.Popen" and arguments[0] == sys.executable:
        harness.check_may_start_processes()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Allow the harness to start ranks only for tests with the mark."""
    harness.may_start_processes = item.get_closest_marker("ranks") is not None
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share the results of ``once`` between the workers of this session."""
    base = tmp_path_factory.getbasetemp()
    os.environ[once.FOLDER] = str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once")


@pytest.fixture(autouse=True)
def leaves_the_process_alone() -> Iterator[None]:
    """Restore the environment, and check that the replacements of CUDA functions are not installed.

    They would change torch in this process. Commands set variables for the processes that they start.
    """
    handler = signal.getsignal(signal.SIGTERM)
    environment = dict(os.environ)
    yield
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    assert not cpu.installed(), "this test left the stand-ins for torch.cuda in place"
    assert signal.getsignal(signal.SIGTERM) == handler, "this test left another handler of SIGTERM in place"
