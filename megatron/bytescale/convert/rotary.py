"""Converts rotary positions between Hugging Face configurations and Megatron's flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

HuggingFaceConfig = Mapping[str, Any]
"""Values of a Hugging Face ``config.json``, by name."""

LLAMA3_ROPE: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Fixed parameters of Megatron's ``--use-rope-scaling``."""
LATENT_YARN: Final = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
"""Fixed YaRN parameters of Megatron's latent attention, which has no flags for them."""


def position_flags(rope: HuggingFaceConfig, is_latent: bool, is_partial: bool) -> list[str]:
    """Return Megatron's flags for ``rope_parameters``, with latent or standard attention.

    With ``is_partial``, a part of each head may have positions. Raises ValueError for positions that Megatron lacks.
    """
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
    part = rope.get("partial_rotary_factor", 1.0)
    if part != 1.0 and not (is_partial and kind == "default"):
        raise ValueError(f"partial_rotary_factor is {part}: only 1.0 can be converted with these positions")
    flags = ["--rotary-base", number_word(rope["rope_theta"])]
    flags += ["--rotary-percent", str(part)] if part != 1.0 else []
    if kind == "yarn":
        return [*flags, *_yarn_flags(rope, is_latent)]
    flags += ["--position-embedding-type", "rope", *(["--rope-type", "rope"] if is_latent else [])]
    if kind == "default":
        return flags
    if kind == "linear" and not is_latent:
        return [*flags, "--rotary-seq-len-interpolation-factor", number_word(factor)]
    if kind == "llama3" and all(rope[name] == value for name, value in LLAMA3_ROPE.items()) and not is_latent:
        return [*flags, "--use-rope-scaling", "--rope-scaling-factor", str(factor)]
    raise ValueError(f"rotary positions {dict(rope)} cannot be converted")


def number_word(number: float) -> str:
    """Return a number as a word of a command line, whole numbers without a point."""
    return str(int(number)) if float(number).is_integer() else repr(float(number))


def rope_of(raw: HuggingFaceConfig, default_theta: float, max_positions: int) -> dict[str, Any]:
    """Return the ``rope_parameters`` of a ``config.json`` of any version of transformers.

    Versions before 5 write ``rope_theta`` and ``rope_scaling``, later versions write ``rope_parameters``. The kind of
    positions has the key ``rope_type``, or ``type`` in old files.

    Args:
        raw: values of the file.
        default_theta: base of a file without one.
        max_positions: longest position of the model.

    Raises:
        ValueError: the parameters are not a table of numbers and names, or differ between layers.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError(f"rotary positions {given} cannot be converted: Megatron has one kind for all layers")
    rope = {name: value for name, value in given.items() if name != "type"}
    rope["rope_type"] = given.get("rope_type") or given.get("type") or "default"
    theta = given.get("rope_theta")
    rope["rope_theta"] = raw.get("rope_theta") or default_theta if theta is None else theta
    if raw.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    if rope["rope_type"] in ("llama3", "yarn"):
        longest = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = longest or max_positions
    return rope


def of_every_version(rope: HuggingFaceConfig) -> dict[str, Any]:
    """Return the keys of a ``config.json`` for ``rope_parameters``, which transformers 4 and 5 read equally."""
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    is_scaled = rope["rope_type"] != "default"
    part = {name: rope[name] for name in ("partial_rotary_factor",) if name in rope}
    return {
        **part,
        "rope_parameters": dict(rope),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if is_scaled else None,
    }


def _yarn_flags(rope: HuggingFaceConfig, is_latent: bool) -> list[str]:
    """Return YaRN's flags. Raises ValueError for values that only Hugging Face's models support."""
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


@dataclass(frozen=True, kw_only=True)
class RotaryArguments:
    """Megatron's arguments of rotary positions. Models with standard attention lack the arguments of latent attention.

    Attributes:
        position_embedding_type: kind of positions.
        rotary_base: base of the frequencies.
        rotary_percent: part of each head with positions.
        use_rope_scaling: whether frequencies are scaled as in Llama 3.
        rope_scaling_factor: factor of this scaling.
        rotary_seq_len_interpolation_factor: divisor of positions.
        multi_latent_attention: whether attention is latent.
        rope_type: kind of positions in latent attention.
        rotary_scaling_factor: factor of YaRN.
        mscale, mscale_all_dim: YaRN's scales of queries and keys.
        yarn_beta_fast, yarn_beta_slow: numbers of rotations between which YaRN interpolates.
        yarn_original_max_position_embeddings: longest position of the model before YaRN.
        yarn_correction_range_round_to_int: whether the limits of the interpolation are rounded.
    """

    position_embedding_type: str
    rotary_base: float
    rotary_percent: float = 1.0
    use_rope_scaling: bool
    rotary_seq_len_interpolation_factor: float | None
    rope_scaling_factor: float = 8.0
    multi_latent_attention: bool = False
    rope_type: str | None = None
    rotary_scaling_factor: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_original_max_position_embeddings: int | None = None
    yarn_correction_range_round_to_int: bool | None = None

    def yarn(self) -> dict[str, object]:
        """Return ``rope_parameters`` of YaRN. Raises ValueError for scales that transformers does not support."""
        own = {
            "beta_fast": self.yarn_beta_fast,
            "beta_slow": self.yarn_beta_slow,
            "original_max_position_embeddings": self.yarn_original_max_position_embeddings,
        }
        given = {} if self.multi_latent_attention else {name: own[name] for name in own if own[name] is not None}
        parameters: dict[str, object] = {
            "rope_type": "yarn",
            "factor": self.rotary_scaling_factor,
            **{name: given.get(name, value) for name, value in LATENT_YARN.items()},
        }
        if not self.multi_latent_attention and self.yarn_correction_range_round_to_int is False:
            parameters["truncate"] = False
        scales = self.mscale, self.mscale_all_dim
        if scales == (1.0, 0.0):  # Megatron's defaults equal transformers' behaviour without scales
            return parameters
        if not all(scales):
            raise ValueError(f"YaRN with mscale {scales[0]} and mscale_all_dim {scales[1]} cannot be converted")
        return parameters | {"mscale": self.mscale, "mscale_all_dim": self.mscale_all_dim}


def rope_parameters(rotary: RotaryArguments) -> dict[str, object]:
    """Return ``rope_parameters`` for Megatron's arguments. Raises ValueError for YaRN that transformers lacks."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": float(rotary.rotary_base)}
    if rotary.position_embedding_type == "yarn" or (rotary.multi_latent_attention and rotary.rope_type == "yarn"):
        return rope | rotary.yarn()
    if rotary.rotary_percent != 1.0:
        rope["partial_rotary_factor"] = rotary.rotary_percent
    if rotary.use_rope_scaling:
        rope |= {"rope_type": "llama3", "factor": rotary.rope_scaling_factor, **LLAMA3_ROPE}
    elif rotary.rotary_seq_len_interpolation_factor:
        rope |= {"rope_type": "linear", "factor": float(rotary.rotary_seq_len_interpolation_factor)}
    return rope
