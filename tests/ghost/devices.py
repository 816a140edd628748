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
from tests.ghost.engine import APEX, NO_LIBRARIES
from tests.ghost.environment import environment
from tests.ghost.hollow import VARIABLE
from tests.harness import PRELOADED, Devices

_modules = tuple("tests.ghost.preload" if name == "tests.e2e.preload" else name for name in PRELOADED)
_ENGINE = ("tests.ghost.preload_engine",)


def environment_with(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables of a process on ghost GPUs, and these."""
    return {**environment(), **variables}


def ghosts(first: tuple[str, ...] = (), **variables: str) -> Devices:
    """Return ghost GPUs whose server imports further modules first, with further variables."""
    return Devices((*first, *_modules), "nccl", partial(environment_with, variables))


def hollow_ghosts(settings: str, first: tuple[str, ...] = (), **variables: str) -> Devices:
    """Return ghost GPUs without arithmetic (``hollow.py``), with settings of torch's allocator."""
    return ghosts(first, **{VARIABLE: "1", "PYTORCH_ALLOC_CONF": settings}, **variables)


GHOST_GPUS = ghosts()
HOLLOW_GPUS = {settings: hollow_ghosts(settings) for settings in ("", "expandable_segments:True")}
ENGINE_GPUS = ghosts(_ENGINE, **NO_LIBRARIES)
"""Ghost GPUs with TransformerEngine's Python (``engine.py``)."""
APEX_GPUS = ghosts(_ENGINE, **NO_LIBRARIES, **{APEX: "1"})
HOLLOW_ENGINE_GPUS = hollow_ghosts("expandable_segments:True", _ENGINE, **NO_LIBRARIES)


def missing() -> str:
    """Return why this machine has no ghost GPUs, or "" if it has."""
    try:
        build.folder()
    except build.Unavailable as error:
        return f"no ghost GPUs: {error}"
    return ""


needs_ghosts = pytest.mark.skipif(bool(missing()), reason=missing() or "there are ghost GPUs")
