"""Bytes that unfused operators save, against bytes counted by hand for Megatron's layer on CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.activation.operators import FUSED, LayerOperators
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.tensors import layer_tensors, split_tensors
from bytescale_ext.plan.cost.model_shape import ModelShape

SHAPE = ModelShape(4, 128, 4, 2, 32, 352, True, 256)
SPLIT = LayerOperators(split_norms=True, split_activation=True, angles=32, split_angles=True)


def bytes_of(operators: LayerOperators, element_bytes: int = 4, shape: ModelShape = SHAPE, ranks: int = 1) -> float:
    tensors = layer_tensors(shape, element_bytes, ranks, ranks > 1, operators)
    return sum(tensor.bytes_per_token for tensor in tensors)


def test_fused_kernels_save_nothing_in_between() -> None:
    assert split_tensors(SHAPE, FUSED) == ()
    assert FUSED.norm_bytes(128, 4) == 0.0
    fused = LayerOperators(angles=32)
    assert split_tensors(SHAPE, fused) == ()
    assert fused.angle_bytes == 4 * 32


@pytest.mark.parametrize(("element_bytes", "expected"), [(4, 12184), (2, 7128)])
def test_a_layer_on_cpu(element_bytes: int, expected: int) -> None:
    """Bytes that autograd kept for the model of ``scripts/bench/search/truth.py``, in float32 and in bfloat16."""
    assert bytes_of(SPLIT, element_bytes) == pytest.approx(expected, rel=0.01)
    if element_bytes == 4:
        assert bytes_of(SPLIT) == expected


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"qk_norms": True}, 512 + 1024 + (512 + 256) + 4),
        ({"mask_bytes": 4}, 2 * 512),
        ({"mask_bytes": 1}, 2 * 128),
        ({"split_norms": False}, -2 * (512 + 4)),
        ({"angles": 16}, -4 * 16 * 4),
        ({"split_angles": False}, -4 * 32 * 4),
        ({"split_activation": False}, -2 * 352 * 4),
        ({"joined_norms": True}, 0),
    ],
)
def test_each_operator_counts(changes: dict[str, int], more: float) -> None:
    assert bytes_of(replace(SPLIT, **changes)) - bytes_of(SPLIT) == more


def test_queries_are_copied_only_where_groups_share_keys() -> None:
    heads, operators = replace(SHAPE, num_kv_heads=4), replace(FUSED, qk_norms=True)
    assert bytes_of(operators, shape=heads) - bytes_of(FUSED, shape=heads) == 3 * 512


def test_policies_keep_parts_of_products_that_are_saved() -> None:
    """With a view, autograd keeps the whole memory behind it. A policy stores the part, or the whole product."""
    (view,) = (tensor for tensor in layer_tensors(SHAPE, 4, operators=SPLIT) if tensor.kind == "view")
    assert view.bytes_per_token == 352 * 4
    assert ActivationPlan("shares", 1.0, 0.0, 1.0).shares(view) == (0.0, 0.0, 1.0)
    assert ActivationPlan("priced", 0.3, 0.3, 1.0, True).shares(view) == pytest.approx((0.3, 0.4, 0.3))
