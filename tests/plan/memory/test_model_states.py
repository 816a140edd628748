from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import expert_parameters, num_parameters, state_bytes

LLAMA2_7B = ModelShape(32, 4096, 32, 32, 128, 11008, True, 32000)


def test_llama_has_its_parameters() -> None:
    assert num_parameters(LLAMA2_7B) == 6_738_415_616


def test_ranks_share_matrices_and_not_norms() -> None:
    norms = 65 * 4096
    assert num_parameters(LLAMA2_7B, 4) == (6_738_415_616 - norms) / 4 + norms


def test_experts_are_left_out() -> None:
    shares = {"num_experts": 8, "experts_per_token": 2, "shared_ffn_hidden": 24}
    sparse = replace(LLAMA2_7B, num_expert_layers=8, expert_ffn_hidden=1024, **shares)
    shared_and_routers = 8 * 4096 * (3 * 24 + 8)
    assert num_parameters(LLAMA2_7B) - num_parameters(sparse) == 8 * 3 * 4096 * 11008 - shared_and_routers


def test_ranks_share_out_the_experts_of_each_layer() -> None:
    sparse = replace(
        LLAMA2_7B, num_expert_layers=8, expert_ffn_hidden=1024 + 24, num_experts=16, experts_per_token=2,
        shared_ffn_hidden=24,
    )  # fmt: skip
    assert expert_parameters(sparse) == 8 * 16 * 3 * 4096 * 512
    assert expert_parameters(sparse, tensor_parallel=2, expert_parallel=4) == expert_parameters(sparse) / 8
    assert expert_parameters(sparse.part(16)) == expert_parameters(sparse) / 2
    assert expert_parameters(LLAMA2_7B) == 0


@pytest.mark.parametrize(("element_bytes", "ranks", "each"), [(2, 1, 18.0), (2, 4, 9.0), (4, 1, 16.0), (4, 8, 9.0)])
def test_bytes_of_a_parameter(element_bytes: int, ranks: int, each: float) -> None:
    assert state_bytes(LLAMA2_7B, element_bytes, 1, ranks) == each * 6_738_415_616
