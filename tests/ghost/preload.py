"""Module that the fork server of ghost GPUs imports once: the kernels, and Megatron without stand-ins for CUDA."""

from __future__ import annotations

import importlib.util

from tests.ghost import kernels

NUM_KERNELS = kernels.install()

# Hashing Triton's sources takes seconds, and every rank would do it when it tries the fused kernels.
if importlib.util.find_spec("triton"):
    import triton.experimental.gluon  # noqa: F401
    from triton.runtime import cache

    cache.triton_key()

with kernels.known_devices():
    import tests.e2e.preload  # noqa: F401
