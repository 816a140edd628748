from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.activation import (
    ActivationPlan,
    LayerLoad,
    LayerTensor,
    Machine,
    cost_of_rates,
    layer_load,
    layer_tensors,
)
from bytescale_ext.plan.activation_forecast import DeviceNeed, forecast
from bytescale_ext.plan.activation_policy import (
    make_plan,
    memo_alpha,
    plan_auto,
    plan_memo,
    plan_offload,
    plan_priced,
)
from bytescale_ext.plan.cost import ModelShape, linear_flops_per_token

LLAMA2_7B = ModelShape(32, 4096, 32, 32, 128, 11008, True, 32000)
COST = cost_of_rates(LLAMA2_7B, 650e12, 600e12, 500e12)
H200 = Machine(device_bytes=80e9, host_bytes=1e15)
KIB = 1024


def load_of(length: int, num_layers: int = 32, **changes: object) -> LayerLoad:
    return replace(layer_load(COST, length, num_layers=num_layers), **changes)


def random_load(dice: random.Random) -> LayerLoad:
    """A layer of a few tensors with random sizes and prices."""
    kinds = ("input", "input", "matrix", "matrix", "cheap")
    tensors = tuple(
        LayerTensor(
            f"{kind}{i}", kind, dice.randint(1, 20), dice.randint(1, 30) * (kind == "matrix"), dice.randint(1, 9)
        )
        for i, kind in enumerate(kinds)
    )
    return LayerLoad(
        tensors=tensors,
        num_tokens=dice.randint(1, 50),
        forward_seconds=dice.uniform(0.1, 5),
        backward_seconds=dice.uniform(0.1, 9),
        linear_seconds=dice.uniform(0.1, 4),
        linear_flops=100.0,
        num_layers=dice.randint(3, 6),
        resident_layers=dice.choice((0, 2)),
        in_flight=dice.choice((1, 1, 2)),
        head_bytes=float(dice.randint(0, 300)),
    )


def random_machine(dice: random.Random, load: LayerLoad) -> Machine:
    whole = load.num_layers * load.bytes_of()
    return Machine(
        device_bytes=dice.uniform(0.4, 2.0) * whole,
        host_bytes=dice.uniform(0.0, 1.5) * whole,
        link_bytes_per_second=load.bytes_of() / load.forward_seconds * dice.uniform(0.1, 3),
        memory_bytes_per_second=load.bytes_of() / load.forward_seconds * 20,
    )


def test_bytes_of_a_llama_layer() -> None:
    sizes = {tensor.name: tensor.bytes_per_token / KIB for tensor in layer_tensors(LLAMA2_7B)}
    assert sizes["layer input"] == 8
    assert sizes["query, key, value"] == 24
    assert sizes["attention output"] == 8 and sizes["attention log-sum-exp"] == 0.125
    assert sizes["MLP first output"] == 43 and sizes["activation output"] == 21.5
    assert sum(sizes.values()) == pytest.approx(128.6, abs=0.05)


def test_plain_gpt_has_memos_sixteen_hidden_sizes() -> None:
    shape = ModelShape(32, 4096, 32, 32, 128, 4 * 4096, False, 50257)  # MEMO section 3.2: 16 b s h elements
    rows = [tensor for tensor in layer_tensors(shape) if "log-sum" not in tensor.name]
    assert sum(tensor.bytes_per_token for tensor in rows) == 16 * 4096 * 2


def test_tensor_parallel_ranks_share_what_they_share() -> None:
    whole, split = layer_tensors(LLAMA2_7B), layer_tensors(LLAMA2_7B, tensor_parallel=4)
    both = layer_tensors(LLAMA2_7B, tensor_parallel=4, sequence_parallel=True)
    for one, four, sequence in zip(whole, split, both, strict=True):
        assert sequence.bytes_per_token == one.bytes_per_token / 4
        is_residual = one.name.endswith("norm output") or one.name in ("layer input", "residual after attention")
        assert four.bytes_per_token == one.bytes_per_token / (1 if is_residual else 4)


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


@pytest.mark.parametrize(("length", "expected"), [(16384, 0.26), (32768, 0.37), (65536, 0.58), (98304, 0.79)])
def test_memo_alpha_of_a_7b_layer(length: int, expected: float) -> None:
    assert memo_alpha(load_of(length), H200) == pytest.approx(expected, abs=0.01)


def test_memo_alpha_is_bound_by_host_memory() -> None:
    load = load_of(131072)
    machine = replace(H200, host_bytes=100e9)
    alpha = memo_alpha(load, machine)
    assert 0 < alpha < memo_alpha(load, H200)
    assert forecast(plan_memo(load, machine), load, machine).host_bytes == pytest.approx(100e9)
    with pytest.raises(ValueError, match=r"need 64.* GB of host memory"):
        memo_alpha(load, replace(H200, host_bytes=10e9))


def test_memo_alpha_against_brute_force() -> None:
    dice = random.Random(1)
    for _ in range(300):
        load = random_load(dice)
        machine = random_machine(dice, load)
        always, others = load.bytes_of("input"), load.bytes_of("matrix", "cheap")
        layers = load.in_flight * (load.num_layers - load.resident_layers)
        tried = []
        for alpha in np.linspace(0, 1, 401):
            moved = always + float(alpha) * others
            hides = moved / machine.link_bytes_per_second <= load.forward_seconds
            if hides and layers * moved <= machine.host_bytes:
                tried.append(float(alpha))
        if layers * always > machine.host_bytes:
            with pytest.raises(ValueError, match="host memory"):
                memo_alpha(load, machine)
        else:
            assert memo_alpha(load, machine) == pytest.approx(max(tried, default=0.0), abs=1 / 400)


def test_priced_is_the_best_of_all_shares() -> None:
    dice = random.Random(2)
    grid = np.linspace(0, 1, 9)
    found = 0
    for _ in range(120):
        load = random_load(dice)
        machine = random_machine(dice, load)
        tried = [
            forecast(plan, load, machine).step_seconds
            for swap, keep, inputs in itertools.product(grid, grid, grid)
            if swap + keep <= 1
            for resident in range(load.resident_layers, load.num_layers)
            for plan in [ActivationPlan("priced", swap, 1 - swap - keep, inputs, True, resident)]
            if forecast(plan, load, machine).fits(machine)
        ]
        try:
            plan = plan_priced(load, machine)
        except ValueError:
            assert not tried
            continue
        prediction = forecast(plan, load, machine)
        assert prediction.fits(machine)
        assert not tried or prediction.step_seconds <= min(tried) * (1 + 1e-9)
        found += bool(tried)
    assert found > 60


def test_auto_is_no_slower_than_any_policy_that_fits() -> None:
    dice = random.Random(3)
    for _ in range(100):
        load = random_load(dice)
        machine = random_machine(dice, load)
        seconds = []
        for policy in ("none", "memo", "priced", "offload"):
            try:
                prediction = forecast(make_plan(policy, load, machine), load, machine)
            except ValueError:
                continue
            if prediction.fits(machine):
                seconds.append(prediction.step_seconds)
        if seconds:
            assert forecast(plan_auto(load, machine), load, machine).step_seconds == min(seconds)
        else:
            with pytest.raises(ValueError, match="GB of device memory"):
                plan_auto(load, machine)


def test_nothing_is_done_where_everything_fits() -> None:
    assert plan_auto(load_of(8192, 8), H200).policy == "none"
    assert plan_priced(load_of(8192, 8), H200).is_off
    assert plan_offload(load_of(8192, 8), H200).is_off


def test_free_device_memory_keeps_tensors() -> None:
    load = load_of(32768)
    seconds = []
    for device_bytes in (20e9, 40e9, 80e9, 160e9):
        machine = replace(H200, device_bytes=device_bytes)
        plan = plan_priced(load, machine)
        prediction = forecast(plan, load, machine)
        assert prediction.fits(machine)
        seconds.append(prediction.step_seconds)
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < seconds[0]


def test_priced_hides_everything_earlier_than_memo() -> None:
    """Swapping 91 KiB and not 129 for each token: from 79,000 tokens on instead of 130,000."""

    def first(make: str) -> int:
        lengths = range(40 * KIB, 160 * KIB, KIB)
        tight = Machine(device_bytes=0.0, host_bytes=1e15)
        for length in lengths:
            load = load_of(length)
            moved = load.bytes_of("input", "matrix") if make == "priced" else load.bytes_of()
            if moved / tight.link_bytes_per_second <= load.forward_seconds:
                return length // KIB
        return 0

    assert first("priced") == pytest.approx(79, abs=2)
    assert first("memo") == pytest.approx(127, abs=2)  # 130,000 tokens
    load = load_of(80 * KIB)
    tight = Machine(forecast(plan_memo(load, H200), load, H200).device_bytes, 1e15)
    assert plan_priced(load, tight).recompute == 0.0
    assert plan_memo(load, tight).recompute > 0.2


def test_gains_over_full_recompute_are_those_expected() -> None:
    """7B width, 8 layers (a note's table): 1.12 to 1.27 over full recompute, growing with the length."""
    for length, expected in ((16384, 1.18), (65536, 1.264), (131072, 1.267)):
        load = load_of(length, 8)
        full = 8 * (2 * load.forward_seconds + load.backward_seconds)
        tight = Machine(forecast(plan_memo(load, H200), load, H200).device_bytes, 1e15)
        assert full / forecast(plan_priced(load, tight), load, tight).step_seconds == pytest.approx(expected, abs=0.04)


def test_offload_takes_the_least_share_that_fits() -> None:
    dice = random.Random(4)
    for _ in range(200):
        load = random_load(dice)
        machine = replace(random_machine(dice, load), host_bytes=1e15)
        plan = plan_offload(load, machine)
        assert plan.recompute == 0 and plan.swap == plan.input_swap
        if forecast(plan, load, machine).fits(machine) and plan.swap:
            less = replace(plan, swap=plan.swap * 0.98, input_swap=plan.input_swap * 0.98)
            assert not forecast(less, load, machine).fits(machine)


@pytest.mark.parametrize(
    ("shares", "message"),
    [((1.2, 0.0), "swap fraction is 1.2"), ((-0.1, 0.0), "from 0 to 1"), ((0.7, 0.5), "sum to more than 1")],
)
def test_bad_shares(shares: tuple[float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationPlan("shares", *shares)


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="choose one of none, memo"):
        make_plan("swap", load_of(1024), H200)


def test_fused_norms_are_never_rebuilt() -> None:
    kinds = {tensor.name: tensor.kind for tensor in layer_tensors(LLAMA2_7B, fused_norms=True)}
    assert kinds["input norm output"] == kinds["MLP norm output"] == "input"
    sparse = replace(LLAMA2_7B, num_expert_layers=32, expert_ffn_hidden=1024, num_experts=8)
    kinds = {tensor.name: tensor.kind for tensor in layer_tensors(sparse, fused_norms=True)}
    assert kinds["input norm output"] == "input" and kinds["MLP norm output"] == "cheap"
    plain, fused = layer_load(COST, 65536), layer_load(COST, 65536, fused_norms=True)
    assert plan_memo(fused, H200).swap < plan_memo(plain, H200).swap


def test_device_memory_at_its_two_peaks() -> None:
    """By hand, in layers: 8 of them, 2 resident; what is kept of the others is a quarter."""
    load = load_of(65536, 8)
    layer, edge = load.bytes_of(), max(load.working_bytes, load.head_bytes)
    need = DeviceNeed.of(load, 2, moves=True)
    assert need.device_bytes(0.25 * layer) == pytest.approx(2 * layer + 6 * 0.25 * layer + edge)
    alone = DeviceNeed.of(load, 0, moves=False)
    in_backward = layer + 7 * 0.25 * layer + load.working_bytes
    assert alone.device_bytes(0.25 * layer) == pytest.approx(max(in_backward, 8 * 0.25 * layer + edge))
    for one in (need, alone, DeviceNeed.of(load, 3, moves=True, copies=5e9)):
        for kept in (0.0, 0.1 * layer, 0.9 * layer):
            assert one.most_kept(one.device_bytes(kept)) == pytest.approx(kept, abs=1.0)
        assert one.most_kept(0.5 * one.device_bytes(0.0)) < 0


def test_experts_are_left_alone() -> None:
    sparse = replace(LLAMA2_7B, num_expert_layers=32, expert_ffn_hidden=1024, num_experts=8)
    assert [tensor.name for tensor in layer_tensors(sparse)] == [t.name for t in layer_tensors(LLAMA2_7B)][:-2]
