"""Imported once by the fork server: Megatron on CPU, so that every rank of an end-to-end test starts with it."""

import argparse
from functools import cache, partial

from megatron.bytescale import cpu

STAND_INS = cpu.install_if_wanted(["--cpu"])

import megatron.core.models.mimo.optimizer  # noqa: E402
import megatron.core.tokenizers.text.libraries  # noqa: E402
import megatron.training.models.gpt  # noqa: E402, F401
from megatron.training.argument_utils import ArgumentGroupFactory  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402

import megatron.bytescale.core.models.gpt.chunked_loss  # noqa: E402
import megatron.bytescale.core.optimizer.distrib_optimizer  # noqa: E402
import megatron.bytescale.training.activation_memory  # noqa: E402
import megatron.bytescale.training.hdp  # noqa: E402
import megatron.bytescale.training.slices  # noqa: E402
import megatron.bytescale.training.stock  # noqa: E402, F401

# Megatron reads the help of its flags from its own sources each time it parses: a fifth of a short run.
read_help = cache(partial(ArgumentGroupFactory._get_field_docstrings, ArgumentGroupFactory))
ArgumentGroupFactory._get_field_docstrings = staticmethod(read_help)
add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
