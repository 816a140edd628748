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


def largest_of_passes(rank: int, world: int) -> list[torch.Tensor | None]:
    """Return the largest logits after a pass without gradients, a training pass, and a pass that recomputes it."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from torch.utils.checkpoint import checkpoint

    from bytescale_ext.attention.kernels.table import choose_kernel
    from megatron.bytescale.core.transformer.dot_product_attention import SampleAttention

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * SIZE, num_attention_heads=HEADS, num_query_groups=GROUPS
    )
    kernel = choose_kernel(torch.device("cpu"), torch.float32, SIZE)[0]
    module = SampleAttention(config, runtime=runtime_of(kernel=kernel))
    torch.manual_seed(1)
    inputs = [torch.randn(TOKENS, SAMPLES, heads, SIZE, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]
    found: list[torch.Tensor | None] = []

    def note() -> None:
        largest = module.current_max_attn_logits
        found.append(None if largest is None else largest.clone())

    module(*inputs)
    note()  # nothing measures
    module.measures_logits = True
    with torch.no_grad():
        module(*inputs)
    note()
    module(*inputs)
    note()
    module.current_max_attn_logits = None
    output = checkpoint(module, *inputs, use_reentrant=True)
    note()
    output.sum().backward()
    note()
    keys = inputs[1].repeat_interleave(HEADS // GROUPS, 2)
    scores = torch.einsum("qbhd,kbhd->bhqk", inputs[0], keys) * SIZE**-0.5
    unseen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    found.append(scores.detach().masked_fill(unseen, -torch.inf).amax((0, 2, 3)))
    return found


@pytest.mark.ranks
def test_only_training_passes_measure_their_largest_logits() -> None:
    """A recomputed layer measures once, in its second forward pass."""
    off, without_gradients, trained, recomputed, again, wanted = run_ranks(largest_of_passes, 1)[0]
    assert off is None
    assert without_gradients is None
    assert recomputed is None
    torch.testing.assert_close(trained, wanted)
    torch.testing.assert_close(again, wanted)
