"""A plan of ``bytescale memory-plan`` in training (MEMO section 4.2): checked, applied, compared with a step."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescale_ext.config.activations import ActivationConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.memory.step_file import StepMemory, StepRecord
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.build import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the memory plan."""
    group = parser.add_argument_group("bytescale: memory plan")
    group.add_argument(
        "--memory-plan",
        type=Path,
        metavar="FILE",
        help="A plan of `bytescale memory-plan --output FILE` for this model: on a GPU its memory is reserved at once, "
        "and swapped layers are read back into buffers of the planned size.",
    )


def resolve(args: Any, run: RunConfig) -> StepMemory:
    """Return the plan. Raises ValueError where it cannot be read, is not a plan, or is for another model or step."""
    activations = run.get(ActivationConfig)
    if activations.offload is not None:
        raise ValueError("--memory-plan needs one share for all micro-batches: give --swap-fraction, or remove it")
    path: Path = args.memory_plan
    try:
        memory = StepMemory.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"--memory-plan {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"--memory-plan {path}: {error}") from None
    load = activations.largest
    dtype = str(args.params_dtype).removeprefix("torch.")
    step = StepRecord(run.shape, load.num_tokens, dtype, activations.layers.loss_tokens, activations.plan(load))
    memory.check_serves(step, path)
    return memory


def build(training: Training, runtime: Runtime) -> Training:
    """Take the planned memory before the first forward pass, and compare the first step with the plan."""
    from megatron.bytescale.training.activation_memory import PlannedMemory

    return PlannedMemory.of(runtime).around(training)


MEMORY_PLAN = Feature(
    name="memory_plan",
    flag="--memory-plan",
    summary="a memory plan of a step: memory reserved before the first step",
    add_arguments=add_arguments,
    is_on=lambda args: args.memory_plan is not None,
    resolve=resolve,
    build=build,
)
