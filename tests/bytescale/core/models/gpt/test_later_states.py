"""Comparison of heads with the states of later tokens, on one rank and on ranks that share the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bytescale_ext.attention.layouts.layout import attention_layout
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

LENGTHS, ROWS, HIDDEN, COUNT = (5, 2), 8, 6, 3


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states of a micro-batch with padding, and the output of a head: [rows, 1, hidden]."""
    generator = torch.Generator().manual_seed(4)
    first, second = torch.randn(2, ROWS, 1, HIDDEN, generator=generator)
    return first * 3, second


def compared(rank: int, world: int, shares: bool) -> tuple[list[float], torch.Tensor]:
    """Return the difference of each head, and the gradient of its output on this rank."""
    from megatron.bytescale.core.models.gpt.later_states import later_states

    shards = tuple(Shard(seq, ((0, length),), (0,)) for seq, length in enumerate(LENGTHS))
    layout = attention_layout(MicroBatch(shards), 0, LENGTHS, ROWS)
    hidden, guess = (one.chunk(world)[rank].clone().requires_grad_() for one in inputs())
    group: Any = torch.distributed.group.WORLD if shares else None

    def refuse(*unused: object) -> Any:
        raise AssertionError("no ring")

    later = later_states(hidden, layout, COUNT, refuse, group)
    each = [later.difference(index, guess) for index in range(COUNT)]
    torch.stack(each).sum().backward()
    assert hidden.grad is None
    assert guess.grad is not None
    return [float(one) for one in each], guess.grad


def by_formula() -> list[float]:
    states, guess = inputs()
    starts, found = (0, LENGTHS[0]), []
    for ahead in range(1, COUNT + 1):
        total = 0.0
        for start, length in zip(starts, LENGTHS, strict=True):
            for row in range(start, start + length - ahead):
                target = states[row + ahead, 0]
                off = ((guess[row, 0] - target) / target.square().mean().sqrt()).abs()
                total += float(torch.where(off < 1, off.square() / 2, off - 0.5).mean())
        found.append(total)
    return found


def test_the_difference_is_that_of_later_tokens_of_the_document() -> None:
    ((alone, whole),) = run_ranks(compared, 1, False)
    assert alone == pytest.approx(by_formula(), rel=1e-5)
    assert whole[4].abs().sum() == 0  # the last token of a document
    assert whole[7].abs().sum() == 0  # padding
    assert (whole[[0, 1, 2, 3, 5]].abs().sum((1, 2)) > 0).all()
    parts = run_ranks(compared, 2, True)
    for each, _ in parts:
        assert each == pytest.approx(alone, rel=1e-5)
    torch.testing.assert_close(torch.cat([part for _, part in parts]), whole)
