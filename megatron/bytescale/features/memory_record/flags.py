"""Records the first training step on every rank of a pipeline and plans its memory (MEMO section 4.2)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.memory.plan_file import RecordTo
from megatron.bytescale.arguments.conditions import chosen
from megatron.bytescale.arguments.values import check_file
from megatron.bytescale.features.activations.memory_plan import StepArguments, step_record
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the record."""
    group = parser.add_argument_group("bytescale: recording a memory plan")
    group.add_argument(
        "--record-memory-plan",
        type=Path,
        metavar="FILE",
        help="Record the allocations of the first step on every stage and tensor-parallel rank, plan their addresses "
        "and write the plans to FILE, for --memory-plan. Training continues afterwards; --train-iters 1 stops it.",
    )


@dataclass(frozen=True, kw_only=True)
class RecordOptions(StepArguments):
    """The flag of the record, and the arguments that determine the recorded step."""

    record_memory_plan: Path


def resolve(options: RecordOptions, run: RunConfig) -> RecordTo:
    """Return the settings of the record and its file. Raises ValueError if the file cannot be written."""
    path = options.record_memory_plan
    check_file("--record-memory-plan", path)
    return RecordTo(path, step_record(options, run, "--record-memory-plan"))


def build(training: Training, runtime: Runtime) -> Training:
    """Trace the first step of each rank."""
    from megatron.bytescale.features.memory_record.build import StepRecorder

    return StepRecorder.of(runtime).around(training)


MEMORY_RECORD = Feature(
    name="memory_record",
    flag="--record-memory-plan",
    summary="records a step of every rank and plans its memory",
    add_arguments=add_arguments,
    is_on=chosen("record_memory_plan"),
    options=RecordOptions,
    resolve=resolve,
    build=build,
)
