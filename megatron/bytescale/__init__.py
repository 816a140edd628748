"""ByteScale on Megatron: runs the plans of ``bytescale_ext`` in Megatron's own training loop.

``install`` applies the rows of the table in ``patches.py``; ``status`` lists the functions that are currently replaced.
Importing this package imports neither Megatron nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.bytescale.registry import Installation
    from megatron.bytescale.runtime import Runtime


def install(runtime: Runtime | None) -> Installation:
    """Check and apply the patch rows that a run's features need, and the rows that every run needs.

    Raises ValueError, before any function is replaced, if Megatron's code is not as expected.
    """
    from megatron.bytescale.features import patches_of
    from megatron.bytescale.patches import ALWAYS, rows_of
    from megatron.bytescale.registry import Installation

    names = () if runtime is None else tuple(runtime.run.features)
    installation = Installation()
    installation.install([*rows_of(ALWAYS, *names), *patches_of(names)], runtime)
    return installation


def status() -> list[str]:
    """Return one line for each patch row: its function, whether it is replaced now, and the reason for the patch."""
    from megatron.bytescale.features import FEATURES, patches_of
    from megatron.bytescale.patches import PATCHES
    from megatron.bytescale.registry import describe

    return [describe(patch) for patch in (*PATCHES, *patches_of([feature.name for feature in FEATURES]))]
