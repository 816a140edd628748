"""Module that the fork server of ghost GPUs with TransformerEngine imports before Megatron."""

from __future__ import annotations

from tests.ghost import engine, kernels

with kernels.known_devices():
    engine.install()
