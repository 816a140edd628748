"""Megatron's configuration of the model, from parsed arguments."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Final

from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args
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


_FUSIONS: Final = ("apply_rope_fusion", "moe_permute_fusion")
"""Arguments that Megatron's configuration accepts only if it can import TransformerEngine."""

_ENGINE: Final = re.compile(r"transformer[- _]?engine|\bTE\b", re.IGNORECASE)


def check_configurations(args: argparse.Namespace, engine_is_elsewhere: bool) -> None:
    """Make Megatron's configurations of the model, the optimizer and gradient buffers, and discard them.

    The training makes them again.

    Args:
        args: result of Megatron's parser, after Megatron's checks.
        engine_is_elsewhere: whether only the training's machine has TransformerEngine. Then the model's configuration
            alone is made, and nothing that depends on the engine is refused.

    Raises what Megatron raises for arguments that do not fit together.
    """
    with _unseen():
        if not engine_is_elsewhere:
            pretrain_cfg_container_from_args(args, core_transformer_config_from_args(args))
            return
        try:
            core_transformer_config_from_args(argparse.Namespace(**vars(args) | dict.fromkeys(_FUSIONS, False)))
        except (AssertionError, ImportError, ValueError) as error:
            if not _ENGINE.search(str(error)):
                raise


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Hide output, warnings and log records, which the training repeats."""
    level = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)
