"""What would end a run, or waste memory, before the first step: three functions of Megatron, and a missing address."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable


def stand_alone() -> None:
    """Give a process that torchrun has not started, and that is the only one, an address for its group."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")  # any free one


def wrap_compile_helpers(original: Callable[[], None], runtime: object) -> Callable[[], None]:
    """Compile Megatron's dataset helper only where it is missing.

    The wheel on PyPI carries it built, and no Makefile: ``make`` fails there, and Megatron exits.
    """

    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


def wrap_set_jit_fusion_options(original: Callable[..., None], runtime: object) -> Callable[..., None]:
    """Leave out the warm-up of the fused kernels on tensors of ``--seq-length`` rows.

    That is the longest context here, which no rank ever holds whole: at 2M tokens the warm-up alone would take
    more memory than a GPU has.
    """

    def set_jit_fusion_options(tp_size: int | None = None) -> None:
        pass

    return set_jit_fusion_options


def wrap_warmup_jit_function(original: Callable[..., None], runtime: object) -> Callable[..., None]:
    """Leave out the warm-up of CUDA kernels, on CPU."""

    def warmup_jit_function(tp_size: int | None = None) -> None:
        pass

    return warmup_jit_function
