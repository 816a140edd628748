"""Rotary positions: Megatron's flags of a Hugging Face configuration's, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

LLAMA3_ROPE: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's ``--use-rope-scaling`` takes for granted."""
LATENT_YARN: Final = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
"""What Megatron's latent attention takes for granted of YaRN: it has no flags for these."""


def position_flags(rope: Mapping[str, Any], is_latent: bool) -> list[str]:
    """Return the flags of ``rope_parameters``, of latent attention or of any other.

    Raises ValueError for positions that Megatron has not.
    """
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor: only 1.0 can be converted")
    flags = ["--rotary-base", str(int(rope["rope_theta"]))]
    if kind == "yarn":
        return [*flags, *_yarn_flags(rope, is_latent)]
    flags += ["--position-embedding-type", "rope", *(["--rope-type", "rope"] if is_latent else [])]
    if kind == "default":
        return flags
    if kind == "linear" and factor == int(factor) and not is_latent:
        return [*flags, "--rotary-seq-len-interpolation-factor", str(int(factor))]
    if kind == "llama3" and all(rope[name] == value for name, value in LLAMA3_ROPE.items()) and not is_latent:
        return [*flags, "--use-rope-scaling", "--rope-scaling-factor", str(factor)]
    raise ValueError(f"rotary positions {dict(rope)} cannot be converted")


def _yarn_flags(rope: Mapping[str, Any], is_latent: bool) -> list[str]:
    """Return YaRN's flags. Raises ValueError for values that only Hugging Face's models compute with."""
    given = {name: rope.get(name) or value for name, value in LATENT_YARN.items()}
    truncates = rope.get("truncate", True)
    scales = [rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0]
    is_fixed = given == LATENT_YARN and truncates
    if not rope.get("factor") or rope.get("attention_factor") is not None or bool(scales[0]) != bool(scales[1]):
        raise ValueError(f"rotary positions {dict(rope)} cannot be converted")
    if is_latent and not is_fixed:
        raise ValueError(f"rotary positions {dict(rope)}: with latent attention Megatron has only {LATENT_YARN}")
    flags = ["--rotary-scaling-factor", str(float(rope["factor"]))]
    if all(scales):
        flags += ["--mscale", str(scales[0]), "--mscale-all-dim", str(scales[1])]
    if is_latent:
        return [*flags, "--position-embedding-type", "rope", "--rope-type", "yarn"]
    flags += ["--position-embedding-type", "yarn"]
    flags += ["--yarn-beta-fast", str(given["beta_fast"]), "--yarn-beta-slow", str(given["beta_slow"])]
    flags += ["--yarn-original-max-position-embeddings", str(int(given["original_max_position_embeddings"]))]
    return flags if truncates else [*flags, "--no-yarn-correction-range-round-to-int"]


def rope_parameters(args: Any) -> dict[str, Any]:
    """Return ``rope_parameters`` of Megatron's arguments. Raises ValueError for YaRN that transformers has not."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(args.rotary_base)}
    is_latent = getattr(args, "multi_latent_attention", False)
    if args.position_embedding_type == "yarn" or (is_latent and args.rope_type == "yarn"):
        return rope | _yarn_parameters(args, is_latent)
    if args.use_rope_scaling:
        rope |= {"rope_type": "llama3", "factor": args.rope_scaling_factor, **LLAMA3_ROPE}
    elif args.rotary_seq_len_interpolation_factor:
        rope |= {"rope_type": "linear", "factor": float(args.rotary_seq_len_interpolation_factor)}
    return rope


def _yarn_parameters(args: Any, is_latent: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "yarn", "factor": args.rotary_scaling_factor}
    for name, value in LATENT_YARN.items():
        own = None if is_latent else getattr(args, f"yarn_{name}")
        found[name] = value if own is None else own
    if not is_latent and args.yarn_correction_range_round_to_int is False:
        found["truncate"] = False
    if (args.mscale, args.mscale_all_dim) == (1.0, 0.0):  # Megatron's defaults, and what transformers computes without
        return found
    if not (args.mscale and args.mscale_all_dim):
        raise ValueError(f"YaRN with mscale {args.mscale} and mscale_all_dim {args.mscale_all_dim} cannot be converted")
    return found | {"mscale": args.mscale, "mscale_all_dim": args.mscale_all_dim}
