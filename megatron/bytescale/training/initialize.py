"""Fixes for the start of a run: three Megatron functions that fail or waste memory, and a missing address."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable


def stand_alone() -> None:
    """Set a process-group address for a single process that torchrun has not started."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")  # any free port


def wrap_compile_helpers(original: Callable[[], None], runtime: object) -> Callable[[], None]:
    """Compile Megatron's dataset helper only if it is missing.

    Megatron's wheel on PyPI contains the compiled helper but no Makefile, so ``make`` fails and Megatron exits.
    """

    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


def wrap_set_jit_fusion_options(original: Callable[..., None], runtime: object) -> Callable[..., None]:
    """Skip the warm-up of the fused kernels on tensors of ``--seq-length`` rows.

    Here ``--seq-length`` is the longest context, which no rank ever holds whole. At 2M tokens the warm-up alone would
    need more memory than a GPU has.
    """

    def set_jit_fusion_options(tp_size: int | None = None) -> None:
        pass

    return set_jit_fusion_options


def wrap_warmup_jit_function(original: Callable[..., None], runtime: object) -> Callable[..., None]:
    """Skip the warm-up of CUDA kernels on CPU."""

    def warmup_jit_function(tp_size: int | None = None) -> None:
        pass

    return warmup_jit_function
