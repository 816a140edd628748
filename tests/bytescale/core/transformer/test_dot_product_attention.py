"""Our attention for samples of one length, against Megatron's local attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

SAMPLES, TOKENS, HEADS, GROUPS, SIZE = 2, 37, 4, 2, 8


def run_both(rank: int, world: int) -> dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Output and gradients of query, key and value, of our attention and of Megatron's, by dtype."""
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
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * SIZE, num_attention_heads=HEADS, num_query_groups=GROUPS,
        attention_dropout=0.0, masked_softmax_fusion=False,
    )  # fmt: skip
    stock = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)

    def run(module: Any, dtype: torch.dtype, mask: torch.Tensor | None) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(4)
        inputs = [
            torch.randn(TOKENS, SAMPLES, heads, SIZE, generator=generator, dtype=torch.float64)
            .to(dtype).requires_grad_()
            for heads in (HEADS, GROUPS, GROUPS)
        ]  # fmt: skip
        output = module(*inputs, mask)
        (output.double() * torch.randn(output.shape, generator=generator, dtype=torch.float64)).sum().backward()
        return [output.detach(), *(one.grad for one in inputs if one.grad is not None)]

    found = {}
    for dtype in (torch.float64, torch.float32):
        kernel = choose_kernel(torch.device("cpu"), dtype, SIZE)[0]
        ours = SampleAttention(config, runtime=SimpleNamespace(comm=None, kernel=kernel))
        found[str(dtype)] = run(ours, dtype, None), run(stock, dtype, mask)
    return found


@pytest.mark.ranks
def test_samples_attend_as_in_megatrons_local_attention() -> None:
    (found,) = run_ranks(run_both, 1)
    for dtype, tolerance in (("torch.float64", 1e-12), ("torch.float32", 1e-5)):
        ours, stock = found[dtype]
        assert len(ours) == 4
        for one, other in zip(ours, stock, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
