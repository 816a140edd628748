"""What a micro-batch reports to Megatron, and which targets have the largest logit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def reported(rank: int, world: int) -> Any:
    from megatron.bytescale.core.models.gpt.draft_loss import report

    sums = torch.tensor([6.0, 4.0, 3.0, 2.0, 1.0, 2.5], requires_grad=True)
    loss, count, figures = report(2, sums)
    loss.backward()
    return sums.grad, int(count), {name: value.tolist() for name, value in figures.items()}


def test_the_report_of_a_micro_batch() -> None:
    grad, count, figures = run_ranks(reported, 1, init_group=False)[0]
    assert grad.tolist() == [1, 0, 0, 0, 0, 0]
    assert count == 4
    assert figures == {
        "draft loss": [6, 4],
        "draft accuracy 1": [2, 4],
        "draft accuracy 2": [1, 3],
        "draft tokens accepted": [2.5, 4],
    }


def largest(rank: int, world: int) -> list[list[bool]]:
    from megatron.bytescale.core.models.gpt.draft_loss import has_largest_logit

    whole = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 4.0, 3.0, 2.0], [0.0, 0.0, 0.0, 1.0]])
    mine = whole.chunk(world, dim=1)[rank].unsqueeze(1)
    group: Any = torch.distributed.group.WORLD
    return [has_largest_logit(mine, torch.tensor([target]), group)[0].tolist() for target in ([1, 0, 3], [3, 1, 0])]


def test_largest_logits_over_two_ranks() -> None:
    assert run_ranks(largest, 2) == [[[True, True, True], [False, False, False]]] * 2
