"""Versions of Megatron: which are installed, tested, and known to the rows of the patch table."""

from __future__ import annotations

import importlib.util
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from megatron.bytescale.patches import ALL, PATCHES
from megatron.bytescale.versions import TESTED, check_megatron_version, installed_megatron

ROOT = Path(__file__).parents[2]
INFO = """MAJOR = 9
MINOR = 8
PATCH = 7
PRE_RELEASE = 'rc1'
VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)
"""


@pytest.fixture
def another_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find a Megatron of version 9.8.7rc1, whose code fails if it is imported."""
    (tmp_path / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "package_info.py").write_text(INFO + "raise RuntimeError")
    spec = ModuleSpec("megatron.core", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


@pytest.mark.usefixtures("another_megatron")
def test_the_version_is_read_without_an_import() -> None:
    assert installed_megatron() == "9.8.7rc1"


@pytest.mark.usefixtures("another_megatron")
def test_a_version_that_is_not_tested_is_named() -> None:
    with pytest.warns(UserWarning, match=r"megatron-core 9\.8\.7rc1 is not tested; tested are 0\.19\.0, 0\.19\.2"):
        check_megatron_version()


def test_no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert installed_megatron() is None
    with pytest.raises(ValueError, match=f"^megatron-core is not installed; install megatron-core=={TESTED[-1]}$"):
        check_megatron_version()


@pytest.mark.parametrize("row", PATCHES, ids=lambda row: row.target.partition(":")[2])
def test_a_row_knows_one_source_of_each_version(row: object) -> None:
    versions = [version for source in row.sources for version in source.versions]  # type: ignore[attr-defined]
    assert sorted(versions) == sorted(ALL)


def test_the_tested_versions_are_those_of_the_package_and_the_readme() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = [line for line in project["dependencies"] if line.startswith("megatron-core")]
    assert needed == f"megatron-core>={TESTED[0]},<0.20"
    assert f"megatron-core=={TESTED[-1]}" in (ROOT / "requirements.in").read_text()
    readme = (ROOT / "README.md").read_text()
    assert all(version in readme for version in TESTED)
