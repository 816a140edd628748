"""Megatron's configuration of the model, from parsed arguments."""

from __future__ import annotations

import argparse
from typing import Final

from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import GPTModelConfig

YARN_OF_LATENTS: Final = {
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
"""Field of the configuration of latent attention -> argument that Megatron reads for other attention only."""


def model_config(args: argparse.Namespace) -> GPTModelConfig:
    """Return the configuration with all values of the arguments; Megatron's own function omits some of them.

    Raises what Megatron raises for arguments that do not fit together.
    """
    config = gpt_config_from_args(args)
    config.rope_scaling_factor = args.rope_scaling_factor
    if args.multi_latent_attention:
        given = {name: getattr(args, argument) for name, argument in YARN_OF_LATENTS.items()}
        vars(config.transformer).update({name: value for name, value in given.items() if value is not None})
    return config
