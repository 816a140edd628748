"""A product whose weight gradient is left for later: the same gradients, and nothing is held once they are computed."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def two_slices(rank: int, world: int) -> None:
    """Two backward passes, then their weight gradients; the last one is delivered by autograd, which hooks see."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    from bytescale_ext.plan.schedule.actions import Action
    from megatron.bytescale.core.tensor_parallel.weight_gradients import Product, SplitProduct, WeightGradients

    torch.manual_seed(0)
    weight, bias = (torch.nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in ((3, 5), (3,)))
    weight.main_grad = torch.zeros_like(weight)
    delivered = []
    weight.register_post_accumulate_grad_hook(lambda one: delivered.append(one.grad.clone()))
    gradients = WeightGradients()
    product = Product(weight, None, False, gradients)
    slices = [torch.randn(rows, 2, 5, dtype=torch.float64, requires_grad=True) for rows in (4, 7)]
    actions = [Action("W", 0, 1), Action("W", 0, 0)]
    held = []
    for action, inputs in zip(actions, slices, strict=True):
        hidden = inputs.tanh()
        held.append(StorageWeakRef(hidden.untyped_storage()))
        output = SplitProduct.apply(hidden, bias, product)
        gradients.collect(action)
        output.square().sum().backward()
        del hidden, output
    assert not any(one.expired() for one in held)
    assert not delivered
    assert not weight.main_grad.any()
    gradients.run(actions[0], is_last=False)
    assert not delivered
    assert [one.expired() for one in held] == [True, False]
    gradients.run(actions[1], is_last=True)
    assert gradients.is_empty
    assert all(one.expired() for one in held)
    assert len(delivered) == 1
    expected = [torch.nn.Parameter(one.detach().clone()) for one in (weight, bias, *slices)]
    sum(torch.nn.functional.linear(one.tanh(), *expected[:2]).square().sum() for one in expected[2:]).backward()
    found = [weight.main_grad + delivered[0], bias.grad, *(one.grad for one in slices)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-10, atol=1e-10)


def test_gradients_are_the_same_and_nothing_stays() -> None:
    run_ranks(two_slices, 1, init_group=False)


def no_step(rank: int, world: int) -> None:
    """A backward pass outside of a step would lose its weight gradient: it is a bug that is found at once."""
    import pytest
    import torch

    from megatron.bytescale.core.tensor_parallel.weight_gradients import Product, SplitProduct, WeightGradients

    product = Product(torch.nn.Parameter(torch.ones(2, 2)), None, False, WeightGradients())
    output = SplitProduct.apply(torch.ones(1, 1, 2, requires_grad=True), None, product)
    with pytest.raises(AssertionError, match="outside of a step"):
        output.sum().backward()


def test_a_backward_pass_outside_of_a_step_fails() -> None:
    run_ranks(no_step, 1, init_group=False)
