"""Times of blocks: the virtual ranks compute what one rank computes, and the times are per rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from bytescale_ext.attention.kernels.contract import Output
from bytescale_ext.attention.kernels.table import Kernel, choose_kernel
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.measure.ring_blocks import Attention, block_seconds, ring_layouts
from bytescale_ext.measure.speeds import Timer

CPU = torch.device("cpu")


def kernel() -> Kernel:
    return choose_kernel(CPU, torch.float32, 8, "reference").kernel


def counting(counts: dict[str, int]) -> Kernel:
    """Return a kernel that counts its calls, which take one second each by ``Timer`` below."""
    plain = kernel()

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
        counts["calls"] += 1
        return plain.forward(q, k, v, block)

    def backward(*args: object) -> object:
        counts["calls"] += 1
        return plain.backward(*args)  # type: ignore[arg-type]

    return dataclasses.replace(plain, forward=forward, backward=backward)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [2, 4])
def test_a_rank_has_one_more_call_for_each_block_that_it_receives(width: int) -> None:
    counts = {"calls": 0}
    clock: Callable[[], float] = lambda: float(counts["calls"])  # noqa: E731
    attention = Attention(counting(counts), 4, 2, 8, torch.float32, CPU)
    forward, backward = block_seconds(((64, 32), width), attention, lambda: Timer(clock, budget=0.0))
    expected = (width * width - 1) / width  # calls of all ranks: one each for their own keys and for each other rank
    assert (forward, backward) == (expected, expected)


def test_layouts_have_all_tokens() -> None:
    assert [layout.num_rows for layout in ring_layouts((64, 32), 1)] == [96]
    assert [layout.num_rows for layout in ring_layouts((64, 32), 4)] == [24] * 4


def test_the_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    attention = Attention(kernel(), 4, 2, 8, torch.float32, CPU)
    assert attention.rows(3, 4).shape == (3, 4, 8)
    assert attention.rows(3, 4).equal(attention.rows(3, 4))
    assert torch.get_rng_state().equal(before)
