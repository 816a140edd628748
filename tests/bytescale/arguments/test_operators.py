"""Fused and unfused operators of a layer, from the arguments of a training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bytescale_ext.plan.activation.operators import LayerOperators
from megatron.bytescale.arguments.operators import operators_of

OPERATOR_ARGS = {
    "transformer_impl": "local", "position_embedding_type": "rope", "apply_rope_fusion": False, "kv_channels": 64,
    "multi_latent_attention": False, "rotary_percent": 0.5, "normalization": "RMSNorm", "bias_swiglu_fusion": True,
    "qk_layernorm": False, "hidden_dropout": 0.0, "hybrid_data_parallel": False,
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
        ({"hidden_dropout": 0.1, "hybrid_data_parallel": True}, True, LayerOperators(angles=32, split_angles=True)),
        (
            {"multi_latent_attention": True, "qk_pos_emb_head_dim": 16, "rotary_percent": 1.0, "qk_layernorm": True},
            True,
            LayerOperators(angles=16, split_angles=True),
        ),
    ],
)
def test_operators_of_arguments(changes: dict[str, object], on_cuda: bool, expected: LayerOperators) -> None:
    assert operators_of(SimpleNamespace(**{**OPERATOR_ARGS, **changes}), on_cuda, 2) == expected
