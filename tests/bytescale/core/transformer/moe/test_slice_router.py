"""Auxiliary losses of micro-batches in slices: those of the whole micro-batch, to the last gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bytescale_ext.config.slices import SliceConfig
from bytescale_ext.plan.schedule.actions import Action
from bytescale_ext.plan.step.sizes import Slicing
from tests.bytescale.core.transformer.moe.test_router import AUX, NUM_TOKENS, build, logged, rows
from tests.bytescale.runtimes import runtime_of
from tests.config.runs import run_of
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

LENGTHS = (6, 1, 4)
BATCH = 2


def slices_and_whole(rank: int, world: int, seed: int) -> None:
    """The gradient of the scores in double precision, for random loads and slices, one of them without tokens."""
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    from megatron.bytescale.core.transformer.moe import loads

    generator = torch.Generator().manual_seed(seed)
    lengths, topk = (5, 0, 9, 1), 3
    whole = torch.rand(sum(lengths), 6, generator=generator, dtype=torch.float64).requires_grad_()
    chosen = torch.zeros_like(whole).scatter(1, whole.topk(topk).indices, 1.0).bool()
    tokens = chosen.sum(0)
    expected = switch_load_balancing_loss_func(whole, tokens, len(whole), topk, 6, 0.7)
    expected.backward()
    step = loads.ExpertLoads(len(lengths))
    parts = [part.detach().requires_grad_() for part in whole.split(lengths)]
    scalars = []
    for index, (part, map_) in enumerate(zip(parts, chosen.split(lengths), strict=True)):
        step.action = Action("F", 0, index)
        load = loads.SliceLoad(map_.sum(0), part.detach().sum(0), len(part), len(part))
        of_router = step.note("router", "aux_loss", load)
        gradient = lambda of=of_router: 0.7 * loads.balance_gradient(of.total(), 6, topk)  # noqa: E731
        scalars.append(loads.GradientOfScores.apply(part, gradient))
        assert step.is_last() == (index == 3)
    value = 0.7 * loads.balance_loss(of_router.total(), 6, topk)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=0)
    for scalar in reversed(scalars):
        scalar.backward()
    found = torch.cat([part.grad for part in parts])
    torch.testing.assert_close(found, whole.grad, rtol=1e-12, atol=0)
    alone = switch_load_balancing_loss_func(parts[0], chosen[:5].sum(0), 5, topk, 6, 0.7)
    assert not torch.allclose(torch.autograd.grad(alone, parts[0])[0] * 5 / 15, whole.grad[:5], rtol=1e-3)
    step.release(Action("B", 0, 0))
    assert not step.unfinished


def test_gradients_of_slices_are_those_of_the_micro_batch() -> None:
    run_ranks(slices_and_whole, 1, 5, init_group=False)


def sliced(router: Any, inputs: torch.Tensor, masks: list[torch.Tensor | None], recomputes: bool) -> None:
    """Run slices forward, with a checkpoint or without, then backward from the last."""
    from torch.utils.checkpoint import checkpoint

    loads, outputs = router.runtime.step.expert_loads, []
    for index, (part, mask) in enumerate(zip(inputs.split(LENGTHS), masks, strict=True)):
        loads.action = Action("F", 0, index)
        part = part.clone().requires_grad_()
        arguments = (part, None if mask is None else mask[:, None])
        outputs.append(checkpoint(router, *arguments, use_reentrant=True) if recomputes else router(*arguments))
    for index in reversed(range(len(LENGTHS))):
        loads.action = Action("B", 0, index)
        (outputs[index][0] * 0).sum().backward()
    loads.release(loads.action)


SETTINGS: dict[str, dict[str, Any]] = {
    "aux": {},
    "sequence": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "both, sigmoid, bias": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [AUX, 0.3],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
}


def samples(rank: int, world: int, name: str, per_token: bool) -> None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron.bytescale.core.transformer.moe.loads import ExpertLoads
    from megatron.bytescale.core.transformer.moe.slice_router import SampleRouter

    settings = {**SETTINGS[name], "calculate_per_token_loss": per_token}
    inputs = rows(sum(LENGTHS) * BATCH).view(sum(LENGTHS), BATCH, -1)
    stock = build("stock", dist.group.WORLD, **settings)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0 if per_token else 1 / 4))  # 4 micro-batches
    assert type(stock) is TopKRouter
    (stock(inputs)[0] * 0).sum().backward()
    expected = logged(stock)
    for recomputes in (False, True):
        router = build("stock", dist.group.WORLD, **settings)
        router.__class__ = SampleRouter
        run = run_of(SliceConfig(Slicing(len(LENGTHS)), LENGTHS, 1))
        router.runtime = runtime_of(run=run)
        router.runtime.step.expert_loads = ExpertLoads(len(LENGTHS))
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0 if per_token else 1 / 12))
        sliced(router, inputs, [None] * len(LENGTHS), recomputes)
        torch.testing.assert_close(router.weight.grad, stock.weight.grad, rtol=1e-5, atol=1e-7)
        assert logged(router) == pytest.approx(expected)
        assert not router.runtime.step.expert_loads.unfinished
        if router.enable_expert_bias:
            assert torch.equal(router.local_tokens_per_expert, stock.local_tokens_per_expert)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_samples_in_slices_have_megatrons_losses(name: str, per_token: bool) -> None:
    run_ranks(samples, 1, name, per_token)


def documents(rank: int, world: int) -> None:
    """Slices with padding, one of them nothing else, against the whole micro-batch without padding."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    from megatron.bytescale.core.transformer.moe.loads import ExpertLoads

    init_num_microbatches_calculator(0, None, 6, 1, 3)
    stock = build("stock", dist.group.WORLD)
    whole = rows(NUM_TOKENS)
    (stock(whole)[0] * 0).sum().backward()
    expected = {name: 6 * mean for name, mean in logged(stock).items()}  # the report divides by 3 ranks x 2
    places, masks = [0, 1, 2, 3, 4], torch.ones(11, dtype=torch.bool)
    places += [7, 8]  # the slice between them has no token
    masks[places] = False
    inputs = torch.randn(11, 1, whole.shape[-1])
    inputs[places] = whole
    for recomputes in (False, True):
        router = build("ours", dist.group.WORLD)
        router.runtime.step.expert_loads = ExpertLoads(len(LENGTHS))
        sliced(router, inputs, list(masks.split(LENGTHS)), recomputes)
        torch.testing.assert_close(router.weight.grad, stock.weight.grad, rtol=1e-5, atol=1e-7)
        assert logged(router) == pytest.approx(expected)


def test_documents_in_slices_have_the_losses_of_their_micro_batch() -> None:
    run_ranks(documents, 1)
