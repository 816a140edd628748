"""Which operators of a layer are fused kernels, from the arguments of a training or from flags in a string."""

from __future__ import annotations

import argparse
import shlex
from typing import Any, Final

from bytescale_ext.plan.activation.operators import LayerOperators

DROPOUT: Final = 0.1
"""Megatron's default for ``--hidden-dropout``."""


def operators_of(args: Any, on_cuda: bool, element_bytes: int) -> LayerOperators:
    """Return the operators that Megatron 0.19.2 builds of these arguments, which ask for nothing the machine lacks.

    Torch has one kernel for RMSNorm on GPUs only, and one for LayerNorm everywhere. Its dropout keeps a mask of bytes
    on GPUs, and on CPU one of the type of the hidden states.
    """
    engine = args.transformer_impl == "transformer_engine"
    has_angles = args.position_embedding_type in ("rope", "yarn") and not args.apply_rope_fusion
    of_head = getattr(args, "qk_pos_emb_head_dim", 64) if args.multi_latent_attention else args.kv_channels
    return LayerOperators(
        joined_norms=engine,
        split_norms=not engine and not on_cuda and args.normalization == "RMSNorm",
        split_activation=not args.bias_swiglu_fusion,
        angles=int(of_head * args.rotary_percent) if has_angles else 0,
        qk_norms=args.qk_layernorm and not args.multi_latent_attention,
        mask_bytes=(1 if on_cuda else element_bytes) if args.hidden_dropout > 0 else 0,
    )


def operators_of_flags(flags: str, head_dim: int, on_cuda: bool, element_bytes: int) -> LayerOperators:
    """Return the operators of a training with these flags; ``head_dim``: of the model.

    On GPUs they are Megatron's own and torch's, unless ``--transformer-impl transformer_engine`` is among the flags.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    parser.add_argument("--transformer-impl", default="local")
    parser.add_argument("--normalization", default="LayerNorm")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    parser.add_argument("--rotary-percent", type=float, default=1.0)
    parser.add_argument("--hidden-dropout", type=float, default=DROPOUT)
    parser.add_argument("--qk-layernorm", action="store_true")
    parser.add_argument("--multi-latent-attention", action="store_true")
    for flag, name in (("--no-rope-fusion", "apply_rope_fusion"), ("--no-bias-swiglu-fusion", "bias_swiglu_fusion")):
        parser.add_argument(flag, action="store_false", dest=name)
    try:
        found, _ = parser.parse_known_args(shlex.split(flags))
    except argparse.ArgumentError as error:
        raise ValueError(f"--model-flags: {error}") from None
    found.kv_channels = head_dim
    if not on_cuda:
        found.transformer_impl, found.bias_swiglu_fusion = "local", False
    found.apply_rope_fusion &= found.transformer_impl == "transformer_engine"
    return operators_of(found, on_cuda, element_bytes)
