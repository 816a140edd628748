"""Rules for every test: it leaves the process unchanged, and only marked tests start processes."""

from __future__ import annotations

import os
import signal
import subprocess
import types
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import settings

from megatron.bytescale import cpu
from tests import harness
from tests.e2e import once


def pytest_configure() -> None:
    """Make the examples of hypothesis equal in every run, without time limits."""
    settings.register_profile("steady", deadline=None, derandomize=True)
    settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start processes, directly or in a fixture; run the longest first."""
    for item in items:
        fixtures = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
        functions = [getattr(item, "function", None), *(one.func for found in fixtures.values() for one in found)]
        if any(map(starts_processes, functions)):
            item.add_marker("ranks")
    items.sort(key=lambda item: (item.get_closest_marker("ranks") is None, not item.nodeid.startswith("tests/e2e/")))


@cache
def starts_processes(value: Any) -> bool:
    """Return whether a function or class of the tests reaches ``run_ranks`` or ``subprocess`` by the names it uses."""
    return not {harness.run_ranks, subprocess}.isdisjoint(reached_from(value))


def reached_from(value: Any) -> set[Any]:
    """Return the functions and classes of the tests that ``value`` uses, through others too, and all their modules."""
    found: set[Any] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        one = getattr(one, "__wrapped__", one)  # of functools.cache and of decorators
        if not str(getattr(one, "__module__", "")).startswith("tests.") or one in found:
            continue
        found.add(one)
        if isinstance(one, type):
            waiting += vars(one).values()
        elif isinstance(one, types.FunctionType):
            names = list(names_in(one.__code__))
            used = [one.__globals__.get(name) for name in names]
            modules = [value for value in used if isinstance(value, types.ModuleType)]
            found.update(modules)
            waiting += [*used, *(vars(module).get(name) for module in modules for name in names)]
    return found


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the global names and attributes that a function uses, nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let the harness start ranks only for tests with the mark."""
    harness.may_start_ranks = item.get_closest_marker("ranks") is not None
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share what ``once`` makes between the workers of this session."""
    base = tmp_path_factory.getbasetemp()
    os.environ[once.FOLDER] = str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once")


@pytest.fixture(autouse=True)
def leaves_the_process_alone() -> Iterator[None]:
    """Check that the stand-ins for CUDA are not installed: they change torch for the whole process."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    assert not cpu.installed(), "this test left the stand-ins for torch.cuda in place"
    assert signal.getsignal(signal.SIGTERM) == handler, "this test left another handler of SIGTERM in place"
