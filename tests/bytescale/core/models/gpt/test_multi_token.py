"""What depths report to Megatron, and which tokens and positions each of them takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def reported(rank: int, world: int) -> Any:
    from bytescale_ext.config.multi_token import MultiTokenConfig
    from megatron.bytescale.core.models.gpt.multi_token import report, report_depths

    def of_model(losses: torch.Tensor) -> Any:
        return losses.sum(), torch.tensor(3), {"lm loss": losses.detach()}

    settings = MultiTokenConfig(2, 0.25)
    output = torch.tensor([4.0, 3.0, 2.0, 8.0, 5.0, 1.0, 10.0, 20.0], requires_grad=True)
    loss, count, figures = report(settings, of_model, output)
    loss.backward()
    again = report_depths(settings, lambda iterator, model: (output, of_model))(None, torch.nn.Identity())[1](output)
    return float(loss), output.grad, int(count), {name: one.tolist() for name, one in figures.items()}, float(again[0])


def test_the_report_of_a_micro_batch() -> None:
    loss, grad, count, figures, again = run_ranks(reported, 1, init_group=False)[0]
    assert loss == again == 30 + 0.25 * (4 + 8)
    assert grad.tolist() == [0.25, 0, 0, 0.25, 0, 0, 1, 1]
    assert count == 3
    assert figures == {"lm loss": [10, 20], "mtp_1 loss": [3, 2], "mtp_2 loss": [5, 1]}


def tables(rank: int, world: int) -> Any:
    from megatron.bytescale.core.models.gpt.multi_token import LaterTokens
    from megatron.bytescale.core.packed_seq_params import DocumentSeqParams

    tokens = LaterTokens.__new__(LaterTokens)  # without the hooks of a model
    tokens.chunk, tokens.settings = SimpleNamespace(), SimpleNamespace(num_heads=2)  # type: ignore[assignment]
    tokens.labels = torch.tensor([[7, 8, 0, 5]])
    future = torch.tensor([[8, -1], [-1, -1], [-1, -1], [6, 9]])
    params = DocumentSeqParams(positions=torch.tensor([4, 5, 6, 0]), future=future)
    _, given = tokens.use_tables(torch.nn.Identity(), (), {"packed_seq_params": params, "other": 1})
    padding = tokens.targets(DocumentSeqParams(positions=torch.zeros(3, dtype=torch.int64)))
    return given["input_ids"].tolist(), given["position_ids"].tolist(), given["other"], padding.tolist()


def test_tokens_and_positions_of_each_depth() -> None:
    ids, positions, other, padding = run_ranks(tables, 1, init_group=False)[0]
    assert ids == [[7, 8, 0, 5], [8, 0, 0, 6]], "depth 1 embeds the label, depth 2 the token after it"
    assert positions == [[5, 0, 0, 1], [0, 0, 0, 2]], "where there is nothing to guess, the position does not matter"
    assert other == 1
    assert padding == [[-1] * 3] * 2
