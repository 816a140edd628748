"""A machine that has only Python, torch, pytest and Megatron: its packages, and an environment of links to them."""

from __future__ import annotations

import re
import sys
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

MEGATRON = "megatron-core"
ROOTS = ("torch", "pytest", "setuptools", "numpy", "nvidia-cuda-runtime", "nvidia-cublas")
"""Packages that such a machine has, with their needs; setuptools compiles kernels of Triton."""


def bare_environment(folder: Path) -> tuple[Path, Path]:
    """Make an environment in ``folder``. Returns its Python, and the folder of Megatron's wheel for PYTHONPATH."""
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv").glob("lib/*/site-packages")
    for package in needs(ROOTS):
        link(package, site)
    wheel = folder / "wheel"
    wheel.mkdir()
    link(distribution(MEGATRON), wheel)
    return folder / "venv" / "bin" / Path(sys.executable).name, wheel


def link(package: Distribution, folder: Path) -> None:
    """Link the top folders and files of an installed package from another folder."""
    for name in {Path(str(file)).parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
        source, target = Path(str(package.locate_file(name))), folder / name
        if source.exists() and not target.exists():
            target.symlink_to(source)


def canonical(name: str) -> str:
    """Return the name of a package in the spelling that all its spellings share."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(roots: tuple[str, ...]) -> list[Distribution]:
    """Return packages and all packages that they need, without extras."""
    found: dict[str, Distribution] = {}
    waiting = list(roots)
    while waiting:
        name = canonical(waiting.pop())
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # of another platform
            continue
        texts = [text for text in found[name].requires or () if "extra ==" not in text]
        waiting += [match[0] for text in texts if (match := re.match(r"[\w.-]+", text))]
    return list(found.values())
