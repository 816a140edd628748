"""The forward step of draft heads, which reports their losses to Megatron instead of the model's own loss."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bytescale_ext.config.drafts import DraftConfig
from megatron.bytescale.core.models.gpt.draft_loss import report, report_both
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.stock import ForwardStep, LossFunction


def report_drafts(settings: DraftConfig, runtime: Runtime, forward_step: ForwardStep) -> ForwardStep:
    """Return a ``forward_step_func`` with the loss of the heads, plus the model's loss if the model is trained too."""

    def forward(data_iterator: Iterator[object], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
        output, of_model = forward_step(data_iterator, model)
        if settings.train_trunk:
            return output, partial(report_both, settings, runtime.step.label_shares, of_model)
        return output, partial(report, settings)

    return forward
