"""The wheel: its contents, its installation next to Megatron, and its removal."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("megatron", "bytescale_ext")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
NOT_SHIPPED = {".gitignore", ".pre-commit-config.yaml"}
# Packages of the environment come after packages of the fresh environment, so that Megatron is found and our package is
# the wheel's. Megatron is located without an import, which would take seconds.
SEE_MEGATRON = (
    f"import sys, importlib.util, runpy; sys.path.append({sysconfig.get_path('purelib')!r}); "
    "core, = importlib.util.find_spec('megatron.core').submodule_search_locations; "
    "print(runpy.run_path(core + '/package_info.py')['__shortversion__']); "
)


def run(*words: object, cwd: Path) -> str:
    """Return the output of a command that must succeed, without this checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout


def files_under(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the tracked files, as in a fresh clone."""
    root = tmp_path_factory.mktemp("source")
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        if (ROOT / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture(scope="module")
def wheel(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with the project's own build backend."""
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-c", BUILD, "build_wheel", out, cwd=copy)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_source_file_is_shipped(names: set[str]) -> None:
    sources = {str(path.relative_to(ROOT)) for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")}
    sources.add("pretrain_gpt_hdp.py")
    assert len(sources) > 40
    assert {name for name in names if name.endswith(".py")} == sources


def test_the_description_has_no_link_that_leads_nowhere(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    metadata = archive.read(name).decode()
    assert "Description-Content-Type: text/markdown" in metadata
    assert "documents you have" in metadata
    assert not re.findall(r"\]\((?!https://|#)", metadata)
    with_address = runpy.run_path(str(ROOT / "setup.py"))["description"]
    text = "![a step](docs/a.png) [the page](docs/b.md#part) [below](#part) [paper](https://a.b/c)"
    assert with_address(text, "https://host/us/it") == (
        "![a step](https://host/us/it/raw/HEAD/docs/a.png) [the page](https://host/us/it/blob/HEAD/docs/b.md#part) "
        "[below](#part) [paper](https://a.b/c)"
    )
    assert with_address(text, None) == " the page [below](#part) [paper](https://a.b/c)"


def test_nothing_else_is_shipped(names: set[str]) -> None:
    assert "megatron/__init__.py" not in names
    tops = {name.split("/")[0] for name in names}
    (metadata,) = tops - {*SHIPPED, "pretrain_gpt_hdp.py"}
    assert metadata.startswith("bytescale_megatron-")
    assert metadata.endswith(".dist-info")
    assert not [name for name in names if name.startswith("megatron/") and not name.startswith("megatron/bytescale/")]


def test_metadata(wheel: Path, names: set[str]) -> None:
    def read(suffix: str) -> str:
        (name,) = [name for name in names if name.endswith(f".dist-info/{suffix}")]
        return zipfile.ZipFile(wheel).read(name).decode()

    assert "bytescale = megatron.bytescale.cli:main" in read("entry_points.txt")
    metadata = read("METADATA")
    assert "Requires-Dist: megatron-core<0.20,>=0.19.0" in metadata
    for extra in ("ray", "solver", "tokenizers", "gpu", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata
    for field in ("Author", "Keywords", "Classifier", "Project-URL", "Description-Content-Type"):
        assert f"\n{field}: " in metadata
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.full
def test_the_source_archive_can_run_the_tests(copy: Path, tmp_path: Path) -> None:
    run(sys.executable, "-c", BUILD, "build_sdist", tmp_path, cwd=copy)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        shipped = {name.partition("/")[2] for name in opened.getnames()}
    tracked = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert {
        name for name in tracked - shipped if "egg-info" not in name and not name.startswith("build/")
    } <= NOT_SHIPPED


@pytest.mark.full
def test_install_beside_megatron_and_uninstall(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "fresh"
    venv.create(place)
    python = place / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--no-input", "--quiet")
    before = files_under(place)
    run(*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel, cwd=tmp_path)
    assert "from megatron.bytescale.cli import main" in (place / "bin" / "bytescale").read_text()
    both = "import megatron.bytescale, bytescale_ext; print(megatron.bytescale.__file__, bytescale_ext.__file__)"
    version, *files = run(python, "-W", "ignore", "-c", SEE_MEGATRON + both, cwd=tmp_path).split()
    assert version == "0.19.2"
    assert all(Path(file).is_relative_to(place) for file in files), files
    run(*pip, "uninstall", "--yes", "bytescale-megatron", cwd=tmp_path)
    assert files_under(place) == before
    assert run(python, "-W", "ignore", "-c", SEE_MEGATRON, cwd=tmp_path).split() == ["0.19.2"]
