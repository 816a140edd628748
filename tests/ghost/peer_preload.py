"""Module that the fork server of ``peer_tests.py`` imports once: the kernels of ghost GPUs, and Megatron."""

from __future__ import annotations

import warnings

from tests.ghost import kernels

NUM_KERNELS = kernels.install()

with kernels.known_devices(), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt
    import megatron.training.training  # noqa: F401

    import tests.ghost.patched  # noqa: F401
