"""Layers of pipeline stages in the slices from which the planner chooses under an activation policy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bytescale_ext.plan.activation.operators import LayerOperators
from bytescale_ext.plan.evaluate.policy_choice import KEPT_SHARES
from megatron.bytescale.arguments.operators import operators_of
from tests.bytescale.arguments.resolving import resolved
from tests.bytescale.features.slices.test_flags import CHOSEN
from tests.e2e.training import MODEL, TRAIN


@pytest.mark.ranks
def test_under_a_policy_the_planner_chooses_among_the_slices_in_which_it_fits() -> None:
    """Every option that fits has a cost that includes what is copied and rebuilt; less memory leaves fewer options."""
    given = [*MODEL, *TRAIN, "--cpu", *f"{CHOSEN} BUDGET --host-memory-gb 0.1 --no-measured-speeds".split()]

    def options(budget: str, words: str) -> Any:
        words_of_line = [budget if word == "BUDGET" else word for word in given]
        return resolved(4, *words_of_line, *words.split()).features["activations"]

    ample, tight, swapping = (
        options("0.01", "--activation-policy priced"),
        options("0.0009", "--activation-policy priced"),
        options("0.01", "--swap-fraction 1 --link-gb-per-second 0.001"),
    )
    assert 0 < len(tight.fitting_options) < len(ample.fitting_options) == len(ample.options)
    kept = {option.slicing.kept_tokens / 256 for option in ample.options}
    assert kept == set(KEPT_SHARES)
    for one in tight.options:
        fits = one.slicing in {option.slicing for option in tight.fitting_options}
        stages = [replace(tight, layers=layers, slices=one.lengths, options=()) for layers in one.stages]
        assert fits == all(_fits(stage) for stage in stages)
    free, slow = (config.fitting_options[0].stage for config in (ample, swapping))
    assert slow.forward.b > 10 * free.forward.b
    assert slow.backward.b > 10 * free.backward.b
    chosen = tight.fitting_options[-1].slicing
    of_step = tight.in_slices(chosen)
    assert of_step.plan(of_step.largest).swap + of_step.plan(of_step.largest).recompute > 0
    assert of_step.described().startswith("> bytescale: activations priced: swapped")
    assert f"{len(tight.fitting_options)} of {len(tight.options)} combinations" in tight.described()


def _fits(config: Any) -> bool:
    try:
        config.check_fits()
    except ValueError:
        return False
    return True


OPERATOR_ARGS = {
    "transformer_impl": "local", "position_embedding_type": "rope", "apply_rope_fusion": False, "kv_channels": 64,
    "multi_latent_attention": False, "rotary_percent": 0.5, "normalization": "RMSNorm", "bias_swiglu_fusion": True,
    "qk_layernorm": False, "hidden_dropout": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "on_cuda", "expected"),
    [
        ({}, True, LayerOperators(angles=32, split_angles=True)),
        ({}, False, LayerOperators(split_norms=True, angles=32, split_angles=True)),
        ({"normalization": "LayerNorm"}, False, LayerOperators(angles=32, split_angles=True)),
        ({"bias_swiglu_fusion": False}, True, LayerOperators(split_activation=True, angles=32, split_angles=True)),
        (
            {"apply_rope_fusion": True, "transformer_impl": "transformer_engine"},
            True,
            LayerOperators(joined_norms=True, angles=32),
        ),
        ({"position_embedding_type": "none", "qk_layernorm": True}, True, LayerOperators(qk_norms=True)),
        (
            {"hidden_dropout": 0.1, "rotary_percent": 1.0},
            True,
            LayerOperators(angles=64, split_angles=True, mask_bytes=1),
        ),
        (
            {"hidden_dropout": 0.1, "rotary_percent": 1.0},
            False,
            LayerOperators(split_norms=True, angles=64, split_angles=True, mask_bytes=2),
        ),
        (
            {"multi_latent_attention": True, "qk_pos_emb_head_dim": 16, "rotary_percent": 1.0, "qk_layernorm": True},
            True,
            LayerOperators(angles=16, split_angles=True),
        ),
    ],
)
def test_operators_of_arguments(changes: dict[str, object], on_cuda: bool, expected: LayerOperators) -> None:
    assert operators_of(SimpleNamespace(**{**OPERATOR_ARGS, **changes}), on_cuda, 2) == expected
