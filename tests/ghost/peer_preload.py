"""Module that the fork server of ``peer_tests.py`` imports once: the kernels of ghost GPUs, and Megatron."""

from __future__ import annotations

import warnings
from unittest import mock

import torch

from tests.ghost import kernels
from tests.ghost.environment import NUM_DEVICES

NUM_KERNELS = kernels.install()

# As in ``preload.py``: asking the runtime for devices would count as a use of CUDA, which forked children may not have.
with mock.patch.object(torch._C, "_cuda_getDeviceCount", return_value=NUM_DEVICES), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt
    import megatron.training.training  # noqa: F401

    import tests.ghost.patched  # noqa: F401
