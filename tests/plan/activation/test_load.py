from __future__ import annotations

import pytest

from bytescale_ext.plan.cost.model_shape import linear_flops_per_token
from tests.plan.activation.random_loads import H200, LLAMA2_7B, load_of


def test_products_to_rebuild_are_all_but_the_last_of_the_mlp() -> None:
    load = load_of(1024)
    last = 2.0 * LLAMA2_7B.ffn_hidden * LLAMA2_7B.hidden
    assert sum(tensor.flops_per_token for tensor in load.tensors) == pytest.approx(load.linear_flops - last)
    layers = linear_flops_per_token(LLAMA2_7B) - 2 * LLAMA2_7B.hidden * LLAMA2_7B.vocab
    assert load.linear_flops == pytest.approx(layers / 32)
    assert sum(tensor.flops_per_token for tensor in load.tensors) / load.linear_flops == pytest.approx(0.777, abs=1e-3)


def test_prices_put_norms_and_activation_far_below_products() -> None:
    load = load_of(65536)
    prices = {tensor.name: load.price(tensor, H200) for tensor in load.tensors}
    products = [prices[name] for name in ("query, key, value", "residual after attention", "MLP first output")]
    assert max(products) == pytest.approx(min(products), rel=0.01)
    for name in ("input norm output", "MLP norm output", "activation output"):
        assert prices[name] < min(products) / 5
    assert prices["layer input"] == prices["attention output"] == float("inf")
