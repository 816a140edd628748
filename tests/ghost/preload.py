"""Module that the fork server of ghost GPUs imports once: the kernels, and Megatron without stand-ins for CUDA."""

from __future__ import annotations

import importlib.util
from unittest import mock

import torch

from tests.ghost import kernels
from tests.ghost.environment import NUM_DEVICES

NUM_KERNELS = kernels.install()

# Hashing Triton's sources takes seconds, and every rank would do it when it tries the fused kernels.
if importlib.util.find_spec("triton"):
    import triton.experimental.gluon  # noqa: F401
    from triton.runtime import cache

    cache.triton_key()

# Modules ask for the number of devices when they are imported. Asking the runtime counts as a use of CUDA, and torch
# refuses CUDA in the children of a process that has used it.
with mock.patch.object(torch._C, "_cuda_getDeviceCount", return_value=NUM_DEVICES):
    import tests.e2e.preload  # noqa: F401
