"""Split backward passes, with weight gradients in the idle time of pipeline stages (zero bubble, Qi et al. 2023)."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.slices import ZeroBubble
from bytescale_ext.plan.schedule.actions import most_slices
from megatron.bytescale.arguments.conditions import chosen, equals, given
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature
from megatron.bytescale.features.slices.flags import AUTO, ZERO_BUBBLE_FLAG, SliceFlags, slice_options

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag of zero bubble."""
    group = parser.add_argument_group("bytescale: zero bubble")
    group.add_argument(
        ZERO_BUBBLE_FLAG,
        action="store_true",
        help="Backward passes compute only the gradients of activations. The weight gradients of linear layers run "
        "later, while a stage would otherwise wait for its neighbours. No stage holds more slices than the first stage "
        "holds without zero bubble. Works with slices and with whole micro-batches; needs --transformer-impl local.",
    )


def resolve(flags: SliceFlags, run: RunConfig) -> ZeroBubble:
    """Return the number of slices that stages may hold. Raises ValueError for a layout with virtual stages."""
    mesh = run.decision.setup.mesh
    if mesh.virtual_stages > 1:
        raise ValueError(
            f"{ZERO_BUBBLE_FLAG} does not work with virtual stages: change --pipeline-model-parallel-layout"
        )
    return ZeroBubble(most_slices(mesh.num_stages, slice_options(flags).slicing))


def build(training: Training, runtime: Runtime) -> Training:
    """Split the backward passes of all linear layers outside experts."""
    from megatron.training.utils import print_rank_0

    from megatron.bytescale.core.models.gpt.gpt_layer_specs import with_split_products

    most = runtime.run.get(ZeroBubble).most_slices
    print_rank_0(f"> bytescale: weight gradients fill idle time; a stage holds up to {most} slices")
    return training.wrap_layer_spec(partial(with_split_products, runtime=runtime))


_FREED = "remove it: tensors that wait for weight gradients cannot be freed"
_STAGES = "give --pipeline-model-parallel-size 2 or more: one stage has no idle time"
_VIRTUAL = "remove it: Megatron's interleaved schedule has no slots for weight gradients"
REFUSALS = (
    refuse("--pipeline-model-parallel-size 1", "zero_bubble", _STAGES, equals("pipeline_model_parallel_size", 1)),
    *(refuse(flag, "zero_bubble", _VIRTUAL) for flag in (
        "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")),
    refuse("--transformer-impl transformer_engine", "zero_bubble", "use --transformer-impl local",
           equals("transformer_impl", "transformer_engine")),
    refuse(f"--seq1f1b-slices {AUTO}", "zero_bubble", "give a number of slices",
           equals("seq1f1b_slices", AUTO)),
    *(refuse(flag, "zero_bubble", _FREED) for flag in ("--recompute-granularity", "--recompute-activations")),
    refuse("--activation-policy", "zero_bubble", _FREED, ~equals("activation_policy", "none")),
    *(refuse(flag, "zero_bubble", _FREED, applies) for flag, applies in (
        ("--swap-fraction", chosen("swap_fraction")),
        ("--recompute-fraction", chosen("recompute_fraction")))),
    *(refuse(flag, "zero_bubble", "remove it: a recorded step has no postponed weight gradients") for flag in (
        "--memory-plan", "--record-memory-plan")),
    refuse("gradient accumulation fusion", "zero_bubble", "add --no-gradient-accumulation-fusion",
           given("gradient_accumulation_fusion")),
)  # fmt: skip

ZERO_BUBBLE = Feature(
    name="zero_bubble",
    flag=ZERO_BUBBLE_FLAG,
    summary="zero bubble: weight gradients fill the idle time of pipeline stages",
    add_arguments=add_arguments,
    is_on=given("seq1f1b_zero_bubble"),
    options=SliceFlags,
    resolve=resolve,
    build=build,
    refusals=REFUSALS,
)
