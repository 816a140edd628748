"""The versions of Megatron that the project runs on, read without importing Megatron."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import warnings
from pathlib import Path

TESTED = ("0.19.0", "0.19.2")
"""Releases of megatron-core that the tests run with (``make test``, ``make megatron``)."""
REMEDY = f"install megatron-core=={TESTED[-1]}, or see docs/guide/upgrade.md (make next)"


def installed_megatron() -> str | None:
    """Return the version of the megatron-core that Python would import, without importing it; None without one.

    The version is read from the source, so a source tree on the path counts, whatever wheel is installed.
    """
    found = importlib.util.find_spec("megatron.core")
    if found is None or found.origin is None:
        return None
    parts: dict[str, object] = {}
    for node in ast.parse(Path(found.origin).with_name("package_info.py").read_text()).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.targets[0], ast.Name)
        ):
            parts[node.targets[0].id] = node.value.value
    return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format_map(parts)


def check_megatron_version() -> None:
    """Warn of a version that the tests do not run with. The rows of patches.py refuse code that they do not know.

    Raises ValueError without a Megatron. Imports nothing of it.
    """
    version = installed_megatron()
    if version is None:
        raise ValueError(f"megatron-core is not installed; install megatron-core=={TESTED[-1]}")
    if version not in TESTED:
        warnings.warn(f"megatron-core {version} is not tested; tested are {', '.join(TESTED)}", stacklevel=2)


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or of the Megatron that Python would import; None without it."""
    if package == "megatron-core":
        return installed_megatron()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
