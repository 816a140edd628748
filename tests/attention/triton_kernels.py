"""Compiling kernels of Triton for GPUs, on a machine without one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def kernel_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Any:
    """Return the kernel of a module of ours, which is to be compiled, not interpreted, in a folder of its own."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    module.program.cache_clear()
    kernel = module.program()
    module.program.cache_clear()
    return kernel


def compiled(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], capability: int, **options: int
) -> Any:
    """Return the machine code of a kernel for a compute capability; a size or stride without a type has 32 bits."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**dict.fromkeys(kernel.arg_names, "i32"), **types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants))
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
