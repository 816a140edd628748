from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.activation.tensors import EXPERT_LOAD, expert_bytes, layer_tensors
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import LLAMA_7B, LatentShape
from bytescale_ext.plan.search.costs import in_rings, scaled_cost, strategy_cost
from bytescale_ext.plan.search.strategy import FULL, Strategy
from tests.plan.search.tasks import COST, SHAPE, SPARSE

RATES = (600e12, 500e12, 400e12)
WIDE = replace(LLAMA_7B, hidden=8192, num_heads=64, num_kv_heads=16, ffn_hidden=20480, num_layers=60, vocab=64000)


def assert_same_times(one: ModelCost, other: ModelCost) -> None:
    for name in ("forward", "backward"):
        for letter in "abcgh":
            assert getattr(getattr(one, name), letter) == pytest.approx(getattr(getattr(other, name), letter)), letter
    assert one.head_forward == pytest.approx(other.head_forward)
    assert one.head_backward == pytest.approx(other.head_backward)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 8), (1, 1)])
@pytest.mark.parametrize("shape", [LLAMA_7B, WIDE], ids=["7B", "wide"])
def test_other_ranks_and_models_cost_what_their_rates_say(shape: object, before: int, after: int) -> None:
    assert shape in (LLAMA_7B, WIDE)
    target = LLAMA_7B if shape == LLAMA_7B else WIDE
    known = cost_of_rates(LLAMA_7B, *RATES, tensor_parallel=before)
    assert_same_times(scaled_cost(known, target, after), cost_of_rates(target, *RATES, tensor_parallel=after))


@pytest.mark.parametrize("ranks", [1, 4])
def test_latents_cost_a_model_without_them_their_expansions(ranks: int) -> None:
    """Measured rings include the expansion of received latents, so expansion is work per received token."""
    target = replace(LLAMA_7B, num_kv_heads=32, head_dim=192, latent=LatentShape(0, 512, 64, 128))
    found = scaled_cost(cost_of_rates(LLAMA_7B, *RATES), target, ranks)
    expected = cost_of_rates(target, *RATES, tensor_parallel=ranks)
    assert expected.forward.e > 0
    assert_same_times(
        found,
        replace(
            expected, **dict(zip(("forward", "backward"), in_rings(expected.forward, expected.backward), strict=True))
        ),
    )
    assert (found.forward.e, found.backward.e) == (0, 0)


def test_exchange_and_memory_scale_with_their_bytes() -> None:
    split = scaled_cost(COST, SHAPE, 2)
    assert split.forward.c == pytest.approx(COST.forward.c / 2)
    assert split.forward.g == COST.forward.g
    kept = [sum(one.bytes_per_token for one in layer_tensors(SHAPE, 2, ranks, ranks > 1)) for ranks in (1, 2)]
    assert split.layer_bytes == pytest.approx(COST.layer_bytes * kept[1] / kept[0])
    assert split.recompute_bytes == pytest.approx(COST.recompute_bytes / 2)
    assert split.tensor_parallel == 2


@pytest.mark.parametrize(("device", "ratio"), [("NVIDIA H100", 1.0), ("CPU (x86_64)", 4.0)])
def test_received_blocks_cost_queries_on_a_gpu_and_copied_keys_on_a_cpu(device: str, ratio: float) -> None:
    """A model with as many heads and four times the keys."""
    known = cost_of_rates(LLAMA_7B, *RATES)
    passes = {name: replace(getattr(known, name), h=h, m=1e-5) for name, h in (("forward", 4e-8), ("backward", 8e-8))}
    found = scaled_cost(replace(known, device=device, **passes), replace(LLAMA_7B, num_kv_heads=32), 1)
    assert [found.forward.h, found.backward.h] == pytest.approx([ratio * 4e-8, ratio * 8e-8])
    assert (found.forward.m, found.backward.m) == (1e-5, 1e-5)


def test_measured_collectives_take_their_bytes_and_their_latency() -> None:
    """In float32 a rank receives half of 64 elements of 4 bytes per token, four times in each pass of a layer."""
    measured = replace(COST, dtype="float32", collective=1e-9, latency=2e-4)
    split = scaled_cost(measured, SHAPE, 2)
    for one, whole in ((split.forward, COST.forward), (split.backward, COST.backward)):
        assert one.g == pytest.approx(whole.g + 4 * 2e-4)
        assert one.b == pytest.approx(whole.b / 2 + 4 * 32 * 4 * 1e-9)
    assert (split.collective, split.latency) == (1e-9, 2e-4)
    assert_same_times(scaled_cost(split, SHAPE, 1), measured)
    assert scaled_cost(split, SHAPE, 4).forward.g == pytest.approx(split.forward.g)
    assert scaled_cost(replace(COST, latency=0.0), SHAPE, 2).forward.g == COST.forward.g


def test_shared_experts_hold_more_than_their_share() -> None:
    sparse, apart = replace(COST, shape=SPARSE), Strategy(1, (6,), 1024)
    shared = replace(apart, expert_parallel=4)
    one, other = (strategy_cost(sparse, strategy) for strategy in (apart, shared))
    assert one == sparse
    more = expert_bytes(SPARSE, 2, load=EXPERT_LOAD) - expert_bytes(SPARSE, 2)
    assert other == replace(one, layer_bytes=pytest.approx(one.layer_bytes + more))
    again = strategy_cost(sparse, replace(shared, activations=FULL))
    assert again.backward.b == pytest.approx(one.backward.b + one.forward.b)
