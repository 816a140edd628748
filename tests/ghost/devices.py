"""Ghost GPUs as devices of the harness's ranks: torch's CUDA wheel with the libraries of ``lib/``.

    with ranks_on(GHOST_GPUS):
        train(4, *flags)

A rank is forked from a server that runs with the ghost libraries, has the kernels of ``kernels.py``, and has imported
Megatron without the stand-ins for CPUs. Rank r has device r of a node of eight, and an NCCL process group.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.ghost import build
from tests.ghost.engine import APEX
from tests.ghost.environment import environment
from tests.ghost.hollow import VARIABLE
from tests.harness import PRELOADED, Devices

_modules = tuple("tests.ghost.preload" if name == "tests.e2e.preload" else name for name in PRELOADED)
GHOST_GPUS = Devices(_modules, "nccl", environment)


def hollow_environment(settings: str) -> dict[str, str]:
    """Return the variables of a process on hollow ghost GPUs with settings of torch's allocator."""
    return {**environment(), VARIABLE: "1", "PYTORCH_ALLOC_CONF": settings}


HOLLOW_GPUS = {
    settings: Devices(_modules, "nccl", partial(hollow_environment, settings))
    for settings in ("", "expandable_segments:True")
}
"""Ghost GPUs without arithmetic (``hollow.py``), by the settings of torch's allocator."""


def engine_environment(apex: str = "") -> dict[str, str]:
    """Return the variables of a process on ghost GPUs with TransformerEngine, whose libraries are not loaded."""
    return {**environment(), "NVTE_PROJECT_BUILDING": "1", APEX: apex}


ENGINE_GPUS, APEX_GPUS = (
    Devices(("tests.ghost.preload_engine", *_modules), "nccl", partial(engine_environment, apex)) for apex in ("", "1")
)
"""Ghost GPUs with TransformerEngine's Python (``engine.py``), without and with Apex."""


def missing() -> str:
    """Return why this machine has no ghost GPUs, or "" if it has."""
    try:
        build.folder()
    except build.Unavailable as error:
        return f"no ghost GPUs: {error}"
    return ""


needs_ghosts = pytest.mark.skipif(bool(missing()), reason=missing() or "there are ghost GPUs")
