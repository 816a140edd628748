"""Says what a checkpoint of another kind of run has counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.training.utils import print_rank_0


def wrap_check_checkpoint_args(original: Callable[..., Any], runtime: object) -> Callable[..., Any]:
    """Warn where consumed samples of a run without hybrid data parallelism go on as documents.

    Megatron calls it when it restores the counters of a checkpoint, so not with ``--finetune``.
    """

    def check_checkpoint_args(checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
        consumed = getattr(checkpoint_args, "consumed_train_samples", 0)
        if consumed and not getattr(checkpoint_args, "hybrid_data_parallel", False):
            print_rank_0(
                f"WARNING: the checkpoint counts {consumed:,} windows of {checkpoint_args.seq_length:,} tokens; they "
                "count as documents from now on, and data and learning-rate schedule go on after them. Add --finetune "
                "to begin anew with its weights (docs/recipes.md)."
            )
        return original(checkpoint_args, *args, **kwargs)

    return check_checkpoint_args
