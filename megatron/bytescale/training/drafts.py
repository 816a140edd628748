"""The forward step of draft heads: what it reports to Megatron in place of the model's own loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron.bytescale.core.models.gpt.draft_loss import report


def report_drafts(num_heads: int, forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward_step_func`` whose losses are those of the heads; the model returns their sums already."""

    def forward(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        output, _ = forward_step(data_iterator, model)
        return output, partial(report, num_heads)

    return forward
