"""What a micro-batch reports to Megatron, and which targets have the largest logit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def reported(rank: int, world: int) -> Any:
    from bytescale_ext.config.drafts import DraftConfig
    from megatron.bytescale.core.models.gpt.draft_loss import report, report_both

    def of_model(losses: torch.Tensor) -> Any:
        return losses.sum(), torch.tensor(3), {"lm loss": losses.detach()}

    found = []
    for weight in (0.0, 0.5):
        settings = DraftConfig("clover", 2, 0, 0.7, weight)
        for values, of in (([], partial(report, settings)), ([5.0, 6.0], partial(report_both, settings, of_model))):
            sums = torch.tensor([6.0, 4.0, 3.0, 2.0, 1.0, 2.5, 8.0, *values], requires_grad=True)
            loss, count, figures = of(sums)
            loss.backward()
            found.append((float(loss), sums.grad, int(count), {one: value.tolist() for one, value in figures.items()}))
    return found


def test_the_report_of_a_micro_batch() -> None:
    alone, both, compared, compared_both = run_ranks(reported, 1, init_group=False)[0]
    figures = {
        "draft loss": [6, 4],
        "draft accuracy 1": [2, 4],
        "draft accuracy 2": [1, 3],
        "draft tokens accepted": [2.5, 4],
    }
    hidden = {"draft hidden loss": [8, 4]}
    for (loss, grad, count, found), wanted in ((alone, figures), (compared, figures | hidden)):
        assert (loss, grad.tolist(), count, found) == (6, [1, 0, 0, 0, 0, 0, 0], 4, wanted)
    for (loss, grad, count, found), wanted in ((both, figures), (compared_both, figures | hidden)):
        assert (loss, grad.tolist(), count) == (17, [1, 0, 0, 0, 0, 0, 0, 1, 1], 3)
        assert found == {"lm loss": [5, 6], **wanted}


def largest(rank: int, world: int) -> list[list[bool]]:
    from megatron.bytescale.core.models.gpt.draft_loss import has_largest_logit

    whole = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 4.0, 3.0, 2.0], [0.0, 0.0, 0.0, 1.0]])
    mine = whole.chunk(world, dim=1)[rank].unsqueeze(1)
    group: Any = torch.distributed.group.WORLD
    return [has_largest_logit(mine, torch.tensor([target]), group)[0].tolist() for target in ([1, 0, 3], [3, 1, 0])]


def test_largest_logits_over_two_ranks() -> None:
    assert run_ranks(largest, 2) == [[[True, True, True], [False, False, False]]] * 2
