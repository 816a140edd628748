"""ByteScale on Megatron: what ``bytescale_ext`` decides, acted upon in Megatron's own training loop.

``install`` replaces what the table in ``patches.py`` names; ``status`` tells what is replaced right now. Importing
this package imports neither Megatron nor torch.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.bytescale.core.pipeline_parallel.seq1f1b import SliceRuntime
    from megatron.bytescale.registry import Installation
    from megatron.bytescale.runtime import HdpRuntime

MEGATRON_VERSION = "0.19.2"


def check_megatron_version() -> None:
    """Refuse any Megatron but the one this was written for, before it is imported. Raises ValueError."""
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        found = "not installed"
    if found != MEGATRON_VERSION:
        raise ValueError(f"megatron-core is {found}; install megatron-core=={MEGATRON_VERSION}")


def install(runtime: HdpRuntime | SliceRuntime | None, feature: str = "--hybrid-data-parallel") -> Installation:
    """Check and apply the patch rows of a feature and those that any run needs; without a runtime the second alone.

    Raises ValueError, before anything is replaced, if Megatron is not the one expected.
    """
    from megatron.bytescale.patches import ALWAYS, PATCHES
    from megatron.bytescale.registry import Installation

    installation = Installation()
    features = {ALWAYS, feature} if runtime else {ALWAYS}
    installation.install([patch for patch in PATCHES if patch.feature in features], runtime)
    return installation


def status() -> list[str]:
    """One line per patch row: what it replaces, whether it is replaced right now, and why no hook does it."""
    from megatron.bytescale.patches import PATCHES
    from megatron.bytescale.registry import describe

    return [describe(patch) for patch in PATCHES]
