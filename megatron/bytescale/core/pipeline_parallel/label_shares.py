"""The ratio of a step's labels to the items over which auxiliary losses are means.

Megatron divides the gradients of a step by its labels. An auxiliary loss is a mean over other items: all tokens
(experts), or the tokens that the first draft head predicts. So its sum is multiplied by labels / items, counted over
the whole step before the first backward pass. Then its coefficient does not depend on loss masks, micro-batches, slices
or ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state

from bytescale_ext.config.drafts import DraftConfig
from bytescale_ext.parallel.upload import upload
from megatron.bytescale.runtime import LabelShares

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron.bytescale.runtime import Runtime


def weighs_by_labels(runtime: Runtime, config: TransformerConfig) -> bool:
    """Return whether the model has an auxiliary loss in addition to its own loss, so that labels must be counted."""
    drafts = runtime.run.find(DraftConfig)
    balancing = config.moe_aux_loss_coeff
    coefficients = [config.moe_z_loss_coeff, *(balancing if isinstance(balancing, list) else [balancing])]
    return (config.num_moe_experts is not None and any(coefficients)) or (drafts is not None and drafts.train_trunk)


def label_shares(runtime: Runtime) -> LabelShares:
    """Count the labels of the current step on all ranks. Collective on all processes: one all-reduce of two numbers.

    On the first pipeline stage the first rank of each tensor-parallel group counts. Middle stages may have no tokens.
    """
    step = runtime.step.batch
    assert step is not None, "no planned step is running"
    counts = torch.zeros(2, dtype=torch.float64)
    if (
        parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
    ):
        for packed in step.micro_batches:
            counts[0] += packed.num_labels
            if packed.future is not None:
                counts[1] += (packed.future[:, 0] >= 0).sum()
    counts = upload(counts, runtime.device)
    torch.distributed.all_reduce(counts)
    labels, guesses = counts.float()
    return LabelShares(labels / step.num_tokens, labels / guesses.clamp_min(1.0))
