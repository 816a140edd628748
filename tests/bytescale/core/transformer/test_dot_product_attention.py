"""Our attention for samples of one length, against Megatron's local attention."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from tests.bytescale.runtimes import runtime_of
from tests.harness import run_ranks

SAMPLES, TOKENS, HEADS, GROUPS, SIZE = 2, 37, 4, 2, 8


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "off by one": {"softmax_type": "off-by-one"},
    "sinks and windows": {"softmax_type": "learnable", "window_size": (5, 0)},
}


def run_both(rank: int, world: int) -> dict[tuple[str, str], tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return output and gradients of query, key, value and sinks of our and Megatron's attention, by kind and dtype."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from bytescale_ext.attention.kernels.table import choose_kernel
    from megatron.bytescale.core.transformer.dot_product_attention import SampleAttention

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)

    def run(module: Any, dtype: torch.dtype, mask: torch.Tensor | None) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(4)
        inputs = [
            torch.randn(TOKENS, SAMPLES, heads, SIZE, generator=generator, dtype=torch.float64)
            .to(dtype).requires_grad_()
            for heads in (HEADS, GROUPS, GROUPS)
        ]  # fmt: skip
        module.to(dtype)
        output = module(*inputs, mask)
        (output.double() * torch.randn(output.shape, generator=generator, dtype=torch.float64)).sum().backward()
        leaves = [*inputs, *module.parameters()]
        return [output.detach(), *(one.grad.clone() for one in leaves if one.grad is not None)]

    found = {}
    for kind, flags in KINDS.items():
        config = TransformerConfig(
            num_layers=1, hidden_size=HEADS * SIZE, num_attention_heads=HEADS, num_query_groups=GROUPS,
            attention_dropout=0.0, masked_softmax_fusion=False, init_method_std=1.0, **flags,
        )  # fmt: skip
        for dtype in (torch.float64, torch.float32):
            kernel = choose_kernel(torch.device("cpu"), dtype, SIZE, windows=True)[0]
            ours = SampleAttention(config, runtime=runtime_of(kernel=kernel))
            stock = DotProductAttention(config, 1, AttnMaskType.causal, "self")
            assert list(ours.state_dict()) == list(stock.state_dict())
            ours.load_state_dict(stock.state_dict())
            found[kind, str(dtype)] = run(ours, dtype, None), run(stock, dtype, mask)
    return found


@pytest.mark.ranks
def test_samples_attend_as_in_megatrons_local_attention() -> None:
    (found,) = run_ranks(run_both, 1)
    for (kind, dtype), (ours, stock) in found.items():
        assert len(ours) == (5 if kind == "sinks and windows" else 4)
        tolerance = 1e-12 if dtype == "torch.float64" else 1e-5
        for one, other in zip(ours, stock, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    outputs = [found[kind, "torch.float64"][0][0] for kind in KINDS]
    assert all((one - other).abs().max() > 1e-3 for one, other in combinations(outputs, 2))
