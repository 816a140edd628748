"""The cost for placements is measured on all ranks together, without any effect on training."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig

from bytescale_ext.config.experts import PlacementConfig
from bytescale_ext.plan.experts.cost import ExpertCost
from bytescale_ext.plan.experts.placement import PlacementPlan
from bytescale_ext.plan.experts.replay import PlacementSettings
from megatron.bytescale.core.transformer.moe.placed_layer import Placements
from megatron.bytescale.core.transformer.moe.slot_experts import SlotExperts
from megatron.bytescale.features.experts.speeds import computing
from tests.bytescale.runtimes import runtime_of
from tests.harness import run_ranks

HIDDEN = 8


class Expert(torch.nn.Module):
    """Experts of two matrices with the interface of Megatron's experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(HIDDEN, 16, dtype=torch.bfloat16)
        self.down = torch.nn.Linear(16, HIDDEN, bias=False, dtype=torch.bfloat16)
        self.seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def forward(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.seen.append((tuple(tokens.shape), tokens.dtype))
        return (self.down(self.up(tokens)) * probs[:, None]).to(tokens.dtype), None


def test_an_expert_is_computed_both_ways_and_stays_as_it_is() -> None:
    expert, before = Expert(), torch.get_rng_state()
    state = {name: value.clone() for name, value in expert.state_dict().items()}
    before = torch.get_rng_state()
    gradients: Any = computing(expert, HIDDEN, torch.device("cpu"))(5)
    assert expert.seen == [((5, HIDDEN), torch.bfloat16)]
    assert [tuple(one.shape) for one in gradients] == [(5, HIDDEN), (16, HIDDEN), (16,), (HIDDEN, 16)]
    assert all(one.isfinite().all() and one.any() for one in gradients)
    assert all(parameter.grad is None for parameter in expert.parameters())
    assert all(torch.equal(value, state[name]) for name, value in expert.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)


def built_experts() -> torch.nn.Module:
    """Return Megatron's experts of a rank in slots."""
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, num_moe_experts=4, moe_ffn_hidden_size=16,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        expert_model_parallel_size=2, use_cpu_initialization=True,
    )  # fmt: skip
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    groups = get_default_pg_collection()
    return SlotExperts(2, config, linears, pg_collection=groups)


def measured(rank: int, world: int) -> tuple[PlacementConfig, list[str]]:
    """Two ranks of a pipeline stage share experts, and a second stage has none."""
    from megatron.core import parallel_state

    from megatron.bytescale.features.experts import loads as experts

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    config = PlacementConfig(4, 2, PlacementSettings("flexmoe", 3, 1.1, 1, ExpertCost(1.0, 1.0, 1.0)), measures=True)
    follower = experts.Follower(config, Placements(PlacementPlan.static(4, 2, 3)), 1)
    lines: list[str] = []
    experts.print_rank_last = lines.append
    chunks: list[torch.nn.Module] = [torch.nn.Linear(1, 1)]
    if rank >= 2:
        chunks.append(torch.nn.Sequential(built_experts(), built_experts()))
    assert experts.measure(runtime_of(), follower, chunks) is chunks
    return follower.config, lines


@pytest.mark.ranks
def test_all_ranks_plan_with_the_same_numbers() -> None:
    ranks = run_ranks(measured, 4)
    (config,) = {config for config, _ in ranks}
    assert not config.measures
    assert (config.num_experts, config.placing.num_slots, config.placing.threshold) == (4, 3, 1.1)
    cost = config.placing.cost
    assert all(0 < seconds < 1 for seconds in (cost.token_seconds, cost.exchange_seconds, cost.copy_seconds))
    (line,) = ranks[3][1]
    number = r"[\d.e+-]+"
    assert re.fullmatch(
        rf"> bytescale: placement of experts, measured at start in {number} s: {number} TFLOP/s in an expert, {number} "
        rf"GB/s in exchanges of tokens, {number} ms for the weights of an expert",
        line,
    )
