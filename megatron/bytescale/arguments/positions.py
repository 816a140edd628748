"""Refusals of position flags that the chosen positions would ignore.

Megatron accepts each of them with every kind of positions; a flag that the kind does not read would change nothing.
"""

from __future__ import annotations

from typing import Final

from megatron.bytescale.arguments.conditions import Condition, equals, given
from megatron.bytescale.arguments.refusals import Refusal, ignored

_IS_LATENT: Final = given("multi_latent_attention")
_IS_PLAIN_YARN: Final = equals("position_embedding_type", "yarn") & ~_IS_LATENT
_IS_LATENT_YARN: Final = _IS_LATENT & ~equals("rope_type", "rope")
_IS_YARN: Final = _IS_PLAIN_YARN | _IS_LATENT_YARN
_IS_PLAIN_ROPE: Final = (
    equals("position_embedding_type", "rope", "mrope") | given("use_rotary_position_embeddings")
) & ~_IS_LATENT
_IS_LATENT_ROPE: Final = _IS_LATENT & equals("rope_type", "rope")
_IS_ROTARY: Final = _IS_PLAIN_ROPE | _IS_PLAIN_YARN | _IS_LATENT
_IS_SCALED: Final = ~equals("rotary_scaling_factor", 1.0, None)
_SCALES_LATENTS: Final = _IS_LATENT_ROPE & _IS_SCALED & ~equals("mscale_all_dim", 0.0, None)  # both scale the scores

_USE_YARN: Final = "add --position-embedding-type yarn (with latent attention: --rope-type yarn), or remove it"
_USE_ROPE: Final = "use --position-embedding-type rope, or remove it"


def _is_set(name: str) -> Condition:
    """Return the condition that an argument is not None; False counts as set."""
    return ~equals(name, None)


POSITION_REFUSALS: Final[tuple[Refusal, ...]] = (
    ignored("--yarn-original-max-position-embeddings without YaRN", _IS_YARN, _USE_YARN),
    ignored("--yarn-beta-fast without YaRN", _IS_YARN, _USE_YARN),
    ignored("--yarn-beta-slow without YaRN", _IS_YARN, _USE_YARN),
    ignored(
        "--yarn-correction-range-round-to-int without --position-embedding-type yarn",
        _IS_PLAIN_YARN,
        "remove it: latent attention rounds the range",
        _is_set("yarn_correction_range_round_to_int"),
    ),
    ignored("--rotary-scaling-factor without YaRN", _IS_YARN | _SCALES_LATENTS, _USE_YARN, _IS_SCALED),
    ignored("--mscale without YaRN", _IS_YARN, _USE_YARN, ~equals("mscale", 1.0, None)),
    ignored(
        "--mscale-all-dim without YaRN", _IS_YARN | _SCALES_LATENTS, _USE_YARN, ~equals("mscale_all_dim", 0.0, None)
    ),
    ignored("--rope-type without --multi-latent-attention", _IS_LATENT, "give --position-embedding-type in its place"),
    ignored("--use-rope-scaling without plain rotary positions", _IS_PLAIN_ROPE, _USE_ROPE),
    ignored(
        "--rope-scaling-factor without --use-rope-scaling",
        given("use_rope_scaling"),
        "add --use-rope-scaling, or remove it",
        ~equals("rope_scaling_factor", 8.0, None),
    ),
    ignored("--rotary-seq-len-interpolation-factor without plain rotary positions", _IS_PLAIN_ROPE, _USE_ROPE),
    ignored(
        "--rotary-percent without plain rotary positions",
        _IS_PLAIN_ROPE | _IS_LATENT_ROPE,
        _USE_ROPE,
        ~equals("rotary_percent", 1.0, None),
    ),
    ignored("--rotary-base without rotary positions", _IS_ROTARY, _USE_ROPE, ~equals("rotary_base", 10000, None)),
    ignored("--rotary-interleaved without plain rotary positions", _IS_PLAIN_ROPE, _USE_ROPE),
    ignored("--no-rope-freq without rotary positions", _IS_PLAIN_ROPE | _IS_PLAIN_YARN, _USE_ROPE),
)
"""Rows of every run."""
