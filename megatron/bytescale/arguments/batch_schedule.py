"""Steps that grow while a run trains: ``--step-batch-size-schedule`` and ``--rampup-batch-size``, in documents."""

from __future__ import annotations

from typing import Any

from megatron.bytescale.arguments.bad_input import refusals_of_megatron


def use_schedule(args: Any) -> None:
    """Write ``--rampup-batch-size``, which Megatron 0.19.2 ignores, as the schedule that it has in its place.

    Changes arguments before Megatron checks them. Raises ValueError for sizes that never reach
    ``--global-batch-size``, and for steps that are not counted in samples.
    """
    if args.rampup_batch_size is not None:
        first, increment, documents = map(int, args.rampup_batch_size)
        sizes = ramp_sizes(first, increment, documents, args.global_batch_size)
        # Megatron's thresholds are tokens, of which each sample counts --seq-length.
        parts = (f"{documents * i // (len(sizes) - 1) * args.seq_length}:{size}" for i, size in enumerate(sizes))
        args.step_batch_size_schedule = " ".join(parts)
        args._is_global_batch_size_explicitly_specified = False  # Megatron refuses it beside a schedule
    if args.step_batch_size_schedule is not None and args.train_samples is None:
        raise ValueError("steps that grow need --train-samples in place of --train-iters")


def ramp_sizes(first: int, increment: int, documents: int, last: int) -> list[int]:
    """Return the sizes of ``--rampup-batch-size``. Raises ValueError where its increments do not lead to ``last``."""
    steps, rest = divmod(last - first, increment) if increment > 0 else (0, 1)
    if first < 1 or steps < 1 or rest or documents < steps:
        raise ValueError(
            f"--rampup-batch-size {first} {increment} {documents} does not reach --global-batch-size {last} in equal "
            "increments"
        )
    return list(range(first, last + 1, increment))


def schedule_of(args: Any, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Return (documents before, documents of a step from then on) of each part of a schedule; nothing without one.

    Raises ValueError for what Megatron's schedule does not accept, or asserts only in mid-run.
    """
    if args.step_batch_size_schedule is None:
        return ()
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator  # with torch

    text = args.step_batch_size_schedule
    with refusals_of_megatron():
        parts = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, text, args.seq_length).schedule
    sizes = [size for _, size in parts]
    if sizes != sorted(sizes):
        raise ValueError(f"--step-batch-size-schedule {text}: steps must not shrink, which ends Megatron's loop")
    if any(size % num_ranks for size in sizes):
        raise ValueError(
            f"--step-batch-size-schedule {text}: each size must be a multiple of the {num_ranks} data-parallel ranks"
        )
    return tuple(parts)
