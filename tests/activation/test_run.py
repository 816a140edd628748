"""Layers under every kind of plan have the loss and gradients of plain layers, and do the planned work."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bytescale_ext.activation.arena import HostArena
from bytescale_ext.activation.counts import split_rows
from bytescale_ext.activation.link import PlainLink
from bytescale_ext.activation.store import ActivationStore
from bytescale_ext.plan.activation.plan import ActivationPlan
from tests.activation.toy_layer import ToyLayer

PLANS = {
    "swap-only": ActivationPlan("shares", 1.0, 0.0, 1.0),
    "offload-half": ActivationPlan("offload", 0.5, 0.0, 0.5),
    "keep-attention-only": ActivationPlan("shares", 0.0, 1.0, 0.0),
    "memo-0": ActivationPlan("memo", 0.0, 1.0, 1.0),
    "memo-0.4": ActivationPlan("memo", 0.4, 0.6, 1.0, False, 1),
    "three-shares": ActivationPlan("shares", 0.3, 0.4, 0.3),
    "priced-0": ActivationPlan("priced", 0.0, 1.0, 1.0, True),
    "priced-0.6": ActivationPlan("priced", 0.6, 0.4, 0.5, True),
    "priced-three-shares": ActivationPlan("priced", 0.3, 0.5, 1.0, True),
}
PRODUCTS = 16 * 32 + 16 * 16 + 16 * 48  # weights of qkv, proj and fc1


def make_layers(store: ActivationStore | None, count: int = 3) -> list[ToyLayer]:
    torch.manual_seed(0)
    return [ToyLayer(number + 1, store) for number in range(count)]


def make_store(plan: ActivationPlan, num_bytes: int = 1 << 22, num_layers: int = 3) -> ActivationStore:
    return ActivationStore(plan, PlainLink(HostArena(torch.empty(num_bytes, dtype=torch.uint8))), num_layers)


def inputs_of(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randn(length, batch, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def results(layers: list[ToyLayer], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return outputs and all gradients of a step with one micro-batch for each input."""
    outputs = []
    for x in inputs:
        out = x
        for layer in layers:
            out = layer(out)
        out.square().sum().backward()
        outputs.append(out.detach())
    gradients = [p.grad for layer in layers for p in layer.parameters()]
    return [*outputs, *[x.grad for x in inputs], *gradients]


def assert_equal(one: torch.Tensor, other: torch.Tensor, plan: ActivationPlan | None = None, num_rows: int = 0) -> None:
    """Results are bitwise equal, except if few rows are recomputed, because their product may use another kernel."""
    if plan is not None and (num_rows > 32 or not plan.recompute):
        assert torch.equal(one, other)
    else:
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("length", [1, 33])
@pytest.mark.parametrize("name", PLANS)
def test_bitwise_equal_to_no_policy(name: str, length: int) -> None:
    store = make_store(PLANS[name])
    got = results(make_layers(store), inputs_of(length, 2), inputs_of(length + 3, 2))
    expected = results(make_layers(None), inputs_of(length, 2), inputs_of(length + 3, 2))
    for one, other in zip(got, expected, strict=True):
        assert_equal(one, other, PLANS[name], length)
    store.check_empty()


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_flops_are_those_planned(name: str) -> None:
    plan, length, batch = PLANS[name], 50, 2
    with FlopCounterMode(display=False) as plain:
        results(make_layers(None), inputs_of(length, batch))
    store = make_store(plan)
    with FlopCounterMode(display=False) as counted:
        results(make_layers(store), inputs_of(length, batch))
    rows = length - split_rows(plan, length).kept
    planned = (3 - plan.resident_layers) * 2 * PRODUCTS * rows * batch
    assert counted.get_total_flops() - plain.get_total_flops() == planned
    assert store.counts.recomputed_flops == planned


def test_swapped_bytes_are_those_planned() -> None:
    length, float_bytes = 40, 4
    always = length * float_bytes * (16 + 16 + 4)  # layer input, attention output, log-sum-exp of four heads
    store = make_store(ActivationPlan("memo", 0.0, 1.0, 1.0))
    results(make_layers(store), inputs_of(length))
    assert store.counts.swapped_bytes == 3 * always
    assert store.counts.kept_bytes == 0
    store = make_store(ActivationPlan("priced", 0.25, 0.5, 1.0, True))
    results(make_layers(store), inputs_of(length))
    products = length // 4 * float_bytes * (32 + 16 + 48)
    assert store.counts.swapped_bytes == 3 * (always + products)
    assert store.counts.kept_bytes == 3 * products


def test_arena_is_never_exceeded_and_what_does_not_fit_stays() -> None:
    for num_bytes in (0, 1000, 30_000):
        store = make_store(ActivationPlan("shares", 1.0, 0.0, 1.0), num_bytes)
        got = results(make_layers(store), inputs_of(64))
        assert store.link.arena.peak_bytes <= num_bytes
        assert store.counts.overflowed_bytes > 0
        assert all(torch.equal(a, b) for a, b in zip(got, results(make_layers(None), inputs_of(64)), strict=True))
        store.check_empty()


@pytest.mark.parametrize("name", ["offload-half", "three-shares"])
@pytest.mark.slow
def test_backward_passes_may_come_in_any_order(name: str) -> None:
    """Orders are as in pipelines (first in, first out), in slices of a sequence (last in, first out) and in between."""
    for order in itertools.permutations(range(3)):
        store, results_of = make_store(PLANS[name]), []
        for layers in (make_layers(store), make_layers(None)):
            inputs = [inputs_of(20 + 3 * i, seed=i) for i in range(3)]
            outputs = []
            for x in inputs:
                for layer in layers:
                    x = layer(x)
                outputs.append(x.sum())
            for index in order:
                outputs[index].backward()
            results_of.append([p.grad for layer in layers for p in layer.parameters()])
        for one, other in zip(*results_of, strict=True):
            assert_equal(one, other, PLANS[name])
        store.check_empty()


@pytest.mark.slow
def test_memory_is_flat_over_changing_lengths() -> None:
    store = make_store(PLANS["three-shares"])
    layers = make_layers(store)
    peaks = []
    for step in range(50):
        results(layers, inputs_of(4 + step * 7 % 20))
        store.check_empty()
        peaks.append(store.link.arena.peak_bytes)
    assert peaks[-1] == peaks[10]
    assert store.link.arena.take(store.link.arena.num_bytes) is not None  # a single free part again


def test_an_exception_leaves_nothing_in_use() -> None:
    store = make_store(PLANS["memo-0.4"])
    layers = make_layers(store)
    layers[0].fails = True
    with pytest.raises(RuntimeError, match="no"):
        results(layers, inputs_of(40))
    layers[1].qkv = torch.nn.Linear(15, 32)  # fails in the middle of a forward pass
    with pytest.raises(RuntimeError, match="shapes"):
        results(layers, inputs_of(40))
    gc.collect()
    store.check_empty()


def test_unfinished_steps_are_noticed() -> None:
    store = make_store(PLANS["memo-0.4"])
    out = make_layers(store)[0](inputs_of(8))
    with pytest.raises(AssertionError, match="waiting"):
        store.check_empty()
    del out
    store.check_empty()


@pytest.mark.slow
def test_random_shares_and_lengths() -> None:
    generator = torch.Generator().manual_seed(5)
    plain = make_layers(None)
    for seed in range(25):
        shares = torch.rand(3, generator=generator)
        swap = float(shares[0])
        plan = ActivationPlan("shares", swap, (1 - swap) * float(shares[1]), float(shares[2]), seed % 2 == 0)
        length = int(torch.randint(20, 90, (), generator=generator))
        store = make_store(plan)
        torch.manual_seed(0)
        got = results(make_layers(store), inputs_of(length, seed=seed))
        for layer in plain:
            layer.zero_grad()
        expected = results(plain, inputs_of(length, seed=seed))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        store.check_empty()


class NormProduct(torch.nn.Module):
    """A norm and the following product as one module that saves the norm's output, as in TransformerEngine."""

    def __init__(self, norm: torch.nn.LayerNorm, product: torch.nn.Linear) -> None:
        super().__init__()
        self.norm, self.product = norm, product

    @property
    def weight(self) -> torch.Tensor:
        return self.product.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(self.norm(x))


def with_fused_norms(layers: list[ToyLayer]) -> list[ToyLayer]:
    for layer in layers:
        layer.qkv, layer.fc1 = NormProduct(layer.norms[0], layer.qkv), NormProduct(layer.norms[1], layer.fc1)
        layer.norms = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    return layers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["memo-0", "memo-0.4", "three-shares", "priced-three-shares"])
def test_norms_inside_of_hook_points(name: str) -> None:
    """Their saved tensors are treated like the layer's input, as in the plans of such layers."""
    plan, length, float_bytes = PLANS[name], 50, 4
    store = make_store(plan)
    with FlopCounterMode(display=False) as counted:
        got = results(with_fused_norms(make_layers(store)), inputs_of(length))
    with FlopCounterMode(display=False) as plain:
        expected = results(with_fused_norms(make_layers(None)), inputs_of(length))
    for one, other in zip(got, expected, strict=True):
        assert_equal(one, other, plan)
    store.check_empty()
    assert counted.get_total_flops() - plain.get_total_flops() == store.counts.recomputed_flops
    if name == "memo-0":
        widths = 16 + 16 + 4 + 2 * (16 + 1 + 1)  # input, attention with its log-sum-exp, norms with mean and deviation
        assert store.counts.swapped_bytes == 3 * length * float_bytes * widths
