from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.activation.tensors import layer_tensors
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from bytescale_ext.plan.search.costs import scaled_cost, strategy_cost
from bytescale_ext.plan.search.strategy import FULL, Strategy
from tests.plan.search.tasks import COST, SHAPE

RATES = (600e12, 500e12, 400e12)
WIDE = replace(LLAMA_7B, hidden=8192, num_heads=64, num_kv_heads=16, ffn_hidden=20480, num_layers=60, vocab=64000)


def assert_same_times(one: ModelCost, other: ModelCost) -> None:
    for name in ("forward", "backward"):
        for letter in "abcgh":
            assert getattr(getattr(one, name), letter) == pytest.approx(getattr(getattr(other, name), letter)), letter
    assert one.head_forward == pytest.approx(other.head_forward)
    assert one.head_backward == pytest.approx(other.head_backward)


def test_the_measured_model_keeps_its_cost() -> None:
    assert scaled_cost(COST, SHAPE, 1) is COST


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 8), (1, 1)])
@pytest.mark.parametrize("shape", [LLAMA_7B, WIDE], ids=["7B", "wide"])
def test_other_ranks_and_models_cost_what_their_rates_say(shape: object, before: int, after: int) -> None:
    assert shape in (LLAMA_7B, WIDE)
    target = LLAMA_7B if shape == LLAMA_7B else WIDE
    known = cost_of_rates(LLAMA_7B, *RATES, tensor_parallel=before)
    assert_same_times(scaled_cost(known, target, after), cost_of_rates(target, *RATES, tensor_parallel=after))


def test_exchange_and_memory_scale_with_their_bytes() -> None:
    split = scaled_cost(COST, SHAPE, 2)
    assert split.forward.c == pytest.approx(COST.forward.c / 2)
    assert split.forward.g == COST.forward.g
    kept = [sum(one.bytes_per_token for one in layer_tensors(SHAPE, 2, ranks, ranks > 1)) for ranks in (1, 2)]
    assert split.layer_bytes == pytest.approx(COST.layer_bytes * kept[1] / kept[0])
    assert split.recompute_bytes == pytest.approx(COST.recompute_bytes / 2)
    assert split.tensor_parallel == 2


def test_full_recompute_repeats_the_forward_pass_and_keeps_the_input() -> None:
    cost = strategy_cost(COST, Strategy(1, (6,), 1024, activations=FULL))
    assert cost.backward == COST.backward + COST.forward
    keys = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * COST.element_bytes
    assert cost.layer_bytes == COST.recompute_bytes + keys


def test_a_chunked_loss_computes_the_output_layer_again() -> None:
    cost = strategy_cost(COST, Strategy(1, (6,), 1024, loss_tokens=256))
    assert cost.head_backward == COST.head_backward + COST.head_forward
    assert cost.backward == COST.backward


def test_element_bytes() -> None:
    assert (COST.element_bytes, replace(COST, dtype="float32").element_bytes) == (2, 4)
