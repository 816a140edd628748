"""Experts with biases train if a rank has all experts, with the gradients of the formula."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def experts_with_biases(rank: int, world: int) -> None:
    """Megatron's experts, with biases weighted by a token's score. With Megatron's own layer they cannot train."""
    from dataclasses import replace

    import torch
    from megatron.core import parallel_state
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.bytescale.core.tensor_parallel.layers import ExpertRowParallelLinear

    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=6, ffn_hidden_size=10, moe_ffn_hidden_size=10, num_attention_heads=1,
        num_moe_experts=2, use_cpu_initialization=True, params_dtype=torch.float64, bias_activation_fusion=False,
    )  # fmt: skip
    plain = LocalSpecProvider().grouped_mlp_modules(False)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    modules = plain.keywords["submodules"]
    build = {**plain.keywords, "submodules": replace(modules, linear_fc2=ExpertRowParallelLinear)}
    experts = plain.func(2, config, pg_collection=groups, **build)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    counts, scores = torch.tensor([3, 4]), torch.rand(7, dtype=torch.float64)
    tokens = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified inplace"):
        plain.func(2, config, pg_collection=groups, **plain.keywords)(tokens, counts, scores)
    output, no_bias = experts(tokens, counts, scores)
    assert no_bias is None
    output.square().sum().backward()
    found = {name: one.grad.clone() for name, one in experts.named_parameters()}
    of_tokens = tokens.grad.clone()
    experts.zero_grad()
    tokens.grad = None
    parts = []
    for expert, rows in zip(experts.local_experts, ([0, 1, 2], [3, 4, 5, 6]), strict=True):
        first, second = expert.linear_fc1, expert.linear_fc2
        hidden = torch.nn.functional.gelu(tokens[rows] @ first.weight.T + first.bias)
        parts.append((hidden @ second.weight.T + second.bias) * scores[rows, None])
    expected = torch.cat(parts)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    expected.square().sum().backward()
    for name, one in experts.named_parameters():
        torch.testing.assert_close(found[name], one.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(of_tokens, tokens.grad, rtol=1e-10, atol=1e-10)


def test_experts_with_biases_train() -> None:
    run_ranks(experts_with_biases, 1)
