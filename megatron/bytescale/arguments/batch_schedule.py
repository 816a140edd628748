"""Step sizes that grow during a run: ``--step-batch-size-schedule`` and ``--rampup-batch-size``, in documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.bytescale.arguments.bad_input import refusals_of_megatron
from megatron.bytescale.arguments.options import Overrides


@dataclass(frozen=True)
class StepSizes:
    """Megatron's flags for step sizes.

    Attributes:
        seq_length: maximum number of tokens in a sample.
        global_batch_size: samples of a step.
        rampup_batch_size: first size, increment, and number of samples until the last size.
        step_batch_size_schedule: thresholds in tokens, each with the step size from there on.
        train_samples: samples of the whole training.
    """

    seq_length: int
    global_batch_size: int | None
    rampup_batch_size: Sequence[str] | None
    step_batch_size_schedule: str | None
    train_samples: int | None


def schedule_overrides(sizes: StepSizes) -> Overrides:
    """Convert ``--rampup-batch-size``, which Megatron 0.19.2 ignores, to the schedule that Megatron supports.

    Raises ValueError for sizes that never reach ``--global-batch-size``, and without ``--train-samples``.
    """
    schedule, settings = sizes.step_batch_size_schedule, dict[str, object]()
    if sizes.rampup_batch_size is not None and sizes.global_batch_size is not None:
        first, increment, documents = map(int, sizes.rampup_batch_size)
        steps = ramp_sizes(first, increment, documents, sizes.global_batch_size)
        starts = ramp_starts(documents, len(steps) - 1)
        # The thresholds of Megatron's schedule are tokens; each sample counts --seq-length.
        schedule = " ".join(f"{start * sizes.seq_length}:{size}" for start, size in zip(starts, steps, strict=True))
        # Megatron refuses an explicit size in addition to a schedule.
        settings = {"step_batch_size_schedule": schedule, "_is_global_batch_size_explicitly_specified": False}
    if schedule is not None and sizes.train_samples is None:
        raise ValueError("growing steps need --train-samples in place of --train-iters")
    return settings


def ramp_sizes(first: int, increment: int, documents: int, last: int) -> list[int]:
    """Return the sizes of ``--rampup-batch-size``. Raises ValueError if its increments do not end at ``last``."""
    steps, rest = divmod(last - first, increment) if increment > 0 else (0, 1)
    if first < 1 or steps < 1 or rest or documents < steps:
        raise ValueError(
            f"--rampup-batch-size {first} {increment} {documents} does not reach --global-batch-size {last} in equal "
            "increments"
        )
    return list(range(first, last + 1, increment))


def ramp_starts(documents: int, increments: int) -> list[int]:
    """Return the documents consumed when each size of a ramp begins, by Megatron's rule.

    Megatron adds ``int(consumed / (documents / increments))`` increments, in floating point.
    """
    part, starts = documents / increments, [0]
    for number in range(1, increments + 1):
        start = documents * number // increments
        while int(start / part) < number:
            start += 1
        starts.append(start)
    return starts


def batch_schedule_of(text: str | None, seq_length: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Return (first document, documents per step) of each part of a schedule; empty without a schedule.

    Raises ValueError for schedules that Megatron refuses at the start or in the middle of a run.
    """
    if text is None:
        return ()
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator  # imports torch

    with refusals_of_megatron():
        parts = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, text, seq_length).schedule
    sizes = [size for _, size in parts]
    if sizes != sorted(sizes):
        raise ValueError(f"--step-batch-size-schedule {text}: steps must not shrink, because that ends Megatron's loop")
    if any(size % num_ranks for size in sizes):
        raise ValueError(
            f"--step-batch-size-schedule {text}: each size must be a multiple of the {num_ranks} data-parallel ranks"
        )
    return tuple(parts)
