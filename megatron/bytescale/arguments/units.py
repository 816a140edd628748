"""Quantities of Megatron that count samples of one length, and count documents under hybrid data parallelism."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

UNITS: Final = {
    "--global-batch-size": "documents of a step; --hdp-global-tokens fixes the tokens of a step",
    "--rampup-batch-size": "documents of a step, and documents of the ramp",
    "--step-batch-size-schedule": "documents of a step, and tokens at which the step grows if each document is full",
    "--train-samples": "documents of the training",
    "--lr-decay-samples": "documents until the learning rate has decayed",
    "--lr-warmup-samples": "documents until the learning rate is warm",
    "--lr-wsd-decay-samples": "documents of the last decay of the learning rate",
    "--eval-iters": "steps of --eval-global-batch-size documents each",
    "--eval-global-batch-size": "documents of a step of an evaluation",
}
"""Flag -> its unit with --hybrid-data-parallel. A document longer than --seq-length is several."""

ALSO: Final = "one epoch, and consumed samples in the log and in checkpoints"
"""Quantities without a flag of their own that count documents too. Throughput counts tokens, as before."""


@dataclass(frozen=True)
class CountedFlags:
    """Megatron's flags of ``UNITS``; None or 0: not given."""

    global_batch_size: int | None
    rampup_batch_size: list[str] | None
    step_batch_size_schedule: str | None
    train_samples: int | None
    lr_decay_samples: int | None
    lr_warmup_samples: int
    lr_wsd_decay_samples: int | None
    eval_iters: int
    eval_global_batch_size: int | None

    def given(self) -> dict[str, str]:
        """Return the flags that are given, with their units."""
        flags = {f"--{field.name.replace('_', '-')}": getattr(self, field.name) for field in fields(self)}
        return {flag: UNITS[flag] for flag, value in flags.items() if value}
