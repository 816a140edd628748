from __future__ import annotations

import pytest

from bytescale_ext.plan.activation.load import COLLECTIVE_BYTES_PER_SECOND, LayerSettings, cost_of_rates, layer_load
from bytescale_ext.plan.cost.model_shape import linear_flops_per_token
from tests.plan.activation.random_loads import H200, LLAMA2_7B, load_of


def test_products_to_rebuild_are_all_but_the_last_of_the_mlp() -> None:
    load = load_of(1024)
    last = 2.0 * LLAMA2_7B.ffn_hidden * LLAMA2_7B.hidden
    assert sum(tensor.flops_per_token for tensor in load.tensors) == pytest.approx(load.linear_flops - last)
    layers = linear_flops_per_token(LLAMA2_7B) - 2 * LLAMA2_7B.hidden * LLAMA2_7B.vocab
    assert load.linear_flops == pytest.approx(layers / 32)
    assert sum(tensor.flops_per_token for tensor in load.tensors) / load.linear_flops == pytest.approx(0.777, abs=1e-3)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_prices_under_tensor_parallelism_count_the_collectives_of_rebuilding(sequence_parallel: bool) -> None:
    """By hand: 4 ranks receive 3/4 of an 8 KiB hidden state to gather it, and twice as much to reduce it."""
    cost = cost_of_rates(LLAMA2_7B, 650e12, 600e12, 500e12, tensor_parallel=4)
    load = layer_load(cost, 1000, LayerSettings(sequence_parallel=sequence_parallel))
    alone = load_of(1000)
    assert load.linear_seconds == pytest.approx(alone.linear_seconds / 4)
    received = 0.75 * 8192 * 1000 / COLLECTIVE_BYTES_PER_SECOND
    assert load.forward_seconds == pytest.approx(alone.forward_seconds / 4 + 4 * received)
    repeated = {
        "query, key, value": received * sequence_parallel,
        "residual after attention": received * (1 if sequence_parallel else 2),
        "MLP first output": received * sequence_parallel,
    }
    for tensor, whole in zip(load.tensors, alone.tensors, strict=True):
        if tensor.kind == "matrix":
            products = alone.rebuild_seconds(whole, H200) / 4
            assert load.rebuild_seconds(tensor, H200) == pytest.approx(products + repeated[tensor.name]), tensor.name
        elif tensor.kind == "cheap":
            assert tensor.received_bytes_per_token == 0
