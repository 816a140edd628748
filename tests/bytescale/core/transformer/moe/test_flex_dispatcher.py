"""Megatron's flex dispatcher with a played DeepEP: ranks with uneven tokens, with one token, and without any token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.doubles import install_deep_ep
from tests.harness import run_ranks

RANKS, EXPERTS, TOP_K, HIDDEN = 4, 8, 2, 8
NUM_TOKENS = (5, 1, 70, 12)
NUM_PASSES = 2  # forward passes before the first backward pass, as in a pipeline


def inputs(rank: int, turn: int, varies: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states [tokens, hidden], choices [tokens, experts] and probabilities. Rank 3 gets no token.

    ``varies``: tokens have different numbers of experts, as under a gate that anneals.
    """
    generator = torch.Generator().manual_seed(10 * turn + rank)
    scores = torch.rand(NUM_TOKENS[rank], EXPERTS, generator=generator)
    scores[:, 6:] -= 1
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(TOP_K).indices, True)
    if varies:
        chosen = torch.zeros_like(chosen).scatter_(1, scores.topk(1).indices, True) | (scores > 0.3)
    tokens = torch.randn(NUM_TOKENS[rank], HIDDEN, generator=generator)
    return tokens.requires_grad_(), chosen, (scores * chosen).requires_grad_()


def expert(number: int, rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Return the output [tokens, hidden] of an expert."""
    return (rows * (number + 1)).sin() * probs[:, None]


def dispatched(rank: int, world: int, backend: str, multiple: int, varies: bool) -> list[tuple[torch.Tensor, ...]]:
    """Return (output, gradients of tokens and probabilities) of each pass of a rank."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    install_deep_ep()
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    config = SimpleNamespace(
        moe_flex_dispatcher_backend=backend, moe_router_topk=TOP_K, num_moe_experts=EXPERTS, moe_router_dtype="fp32",
        moe_expert_capacity_factor=None, moe_permute_fusion=False, moe_flex_dispatcher_num_sms=None,
        moe_pad_expert_input_to_capacity=False, moe_expert_rank_capacity_factor=None, fp8=None, fp4=None,
        moe_hybridep_pad_uneven_dispatch_inputs=True, moe_hybridep_num_blocks_permute=None,
        moe_hybridep_num_blocks_unpermute=None, moe_permute_fusion_into_hybridep=False,
        moe_hybridep_num_sms_preprocessing=None, moe_router_padding_for_quantization=False,
        use_transformer_engine_op_fuser=False,
    )  # fmt: skip
    if varies:
        config.moe_router_topk, config.moe_expert_capacity_factor = EXPERTS, float(EXPERTS)
    if multiple > 1:
        config.fp8, config.fp8_recipe = "hybrid", "tensorwise"
    everyone = torch.distributed.group.WORLD
    alone = torch.distributed.new_subgroups(1)[0]
    groups = SimpleNamespace(ep=everyone, expt_tp=alone, tp_ep=everyone)
    first = rank * EXPERTS // RANKS
    numbers = list(range(first, first + EXPERTS // RANKS))
    dispatcher: Any = MoEFlexTokenDispatcher(len(numbers), numbers, config=cast(Any, config), pg_collection=groups)

    def layer(tokens: torch.Tensor, chosen: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        tokens, probs = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(tokens, chosen, probs))
        rows, counts, probs = dispatcher.dispatch_postprocess(tokens, probs)
        if backend == "hybridep":
            assert all(count % multiple == 0 for count in counts.tolist())
        if rank == 3:
            assert not len(rows)
        parts = zip(numbers, rows.split(counts.tolist()), probs.split(counts.tolist()), strict=True)
        output = torch.cat([expert(*part) for part in parts])
        return cast(torch.Tensor, dispatcher.combine_postprocess(dispatcher.token_combine(
            dispatcher.combine_preprocess(output))))  # fmt: skip

    passes = [(values, layer(*values)) for values in (inputs(rank, turn, varies) for turn in range(NUM_PASSES))]
    for _, output in reversed(passes):
        output.square().sum().backward()
    return [(output.detach(), tokens.grad, probs.grad) for (tokens, _, probs), output in passes]


@pytest.mark.ranks
@pytest.mark.parametrize("varies", [False, True], ids=["top-k", "annealing"])
@pytest.mark.parametrize(("backend", "multiple"), [("deepep", 1), ("hybridep", 1), ("hybridep", 16)])
def test_outputs_and_gradients_are_those_of_one_process(backend: str, multiple: int, varies: bool) -> None:
    for rank, passes in enumerate(run_ranks(dispatched, RANKS, backend, multiple, varies)):
        for turn, (output, token_gradient, prob_gradient) in enumerate(passes):
            tokens, chosen, probs = inputs(rank, turn, varies)
            expected = sum(expert(number, tokens, probs[:, number]) for number in range(EXPERTS))
            expected.square().sum().backward()
            assert torch.allclose(output, expected, atol=1e-6)
            assert torch.allclose(token_gradient, tokens.grad, atol=1e-5)
            assert torch.allclose(prob_gradient, probs.grad * chosen, atol=1e-5)
