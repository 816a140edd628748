"""Record the first training step on every rank of a pipeline, and plan its memory (MEMO section 4.2)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.memory.plan_file import RecordTo
from megatron.bytescale.arguments.values import check_file
from megatron.bytescale.features.activations.memory_plan import step_record
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the recording."""
    group = parser.add_argument_group("bytescale: recording a memory plan")
    group.add_argument(
        "--record-memory-plan",
        type=Path,
        metavar="FILE",
        help="Record the allocations of the first step on every stage and tensor-parallel rank, plan their addresses "
        "and write the plans to FILE, for --memory-plan. Training goes on afterwards; --train-iters 1 ends it.",
    )


def resolve(args: Any, run: RunConfig) -> RecordTo:
    """Return what is recorded, and where it goes. Raises ValueError where the file cannot be written."""
    path: Path = args.record_memory_plan
    check_file("--record-memory-plan", path)
    return RecordTo(path, step_record(args, run, "--record-memory-plan"))


def build(training: Training, runtime: Runtime) -> Training:
    """Trace the first step of each rank."""
    from megatron.bytescale.features.memory_record.build import StepRecorder

    return StepRecorder.of(runtime).around(training)


MEMORY_RECORD = Feature(
    name="memory_record",
    flag="--record-memory-plan",
    summary="records a step of every rank and plans its memory",
    add_arguments=add_arguments,
    is_on=lambda args: args.record_memory_plan is not None,
    resolve=resolve,
    build=build,
)
