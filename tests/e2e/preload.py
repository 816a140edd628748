"""Imported once by the fork server: Megatron on CPU, so that every rank of an end-to-end test starts with it."""

from megatron.bytescale import cpu

STAND_INS = cpu.install_if_wanted(["--cpu"])

import megatron.training.arguments  # noqa: E402
import megatron.training.models.gpt  # noqa: E402, F401

import megatron.bytescale.training.hdp  # noqa: E402
import megatron.bytescale.training.stock  # noqa: E402, F401
