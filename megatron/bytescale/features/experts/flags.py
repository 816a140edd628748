"""Replicas of busy experts on ranks with less work (FlexMoE, Nie et al. 2023)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bytescale_ext.config.experts import PlacementConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.cost.model_cost import LINK_BYTES_PER_SECOND
from bytescale_ext.plan.experts.cost import ExpertCost
from bytescale_ext.plan.experts.placement import check_slots
from bytescale_ext.plan.experts.replay import FLEXMOE, PLACEMENTS, PlacementSettings
from megatron.bytescale.arguments.conditions import NCCLEP, chosen, equals, given
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

FLAG = "--moe-expert-slots"
TFLOPS = 400.0
"""Placeholder for a rank's speed until it is measured."""


@dataclass(frozen=True)
class PlacementOptions:
    """Flags of placement, and Megatron's sizes of the experts.

    Attributes:
        moe_expert_slots: number of experts that each rank can hold.
        moe_placement: method that chooses replicas, and number of steps between its choices.
        moe_placement_threshold: load of the busiest rank, relative to the mean, above which the placement changes.
        moe_placement_speeds: TFLOPs and GB per second; None: measure them.
        num_experts: experts of a layer.
        expert_model_parallel_size: ranks over which experts are distributed.
    """

    moe_expert_slots: int
    moe_placement: tuple[str, int]
    moe_placement_threshold: float
    moe_placement_speeds: Sequence[float] | None
    num_experts: int
    expert_model_parallel_size: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of placement."""
    group = parser.add_argument_group("bytescale: placement of experts")
    group.add_argument(
        FLAG,
        type=int,
        metavar="S",
        help="Number of experts that each expert-parallel rank can hold. Slots beyond its home experts hold replicas "
        "of busy experts of other ranks: their weights come from the home rank in each step, and their gradients go "
        "back to it, so parameters, optimizers and checkpoints are Megatron's own.",
    )
    group.add_argument(
        "--moe-placement",
        type=_placement,
        default=(FLEXMOE, 1),
        metavar="NAME[,N]",
        help="Method that chooses replicas. flexmoe (default): a few changes at a time, each if it shortens the "
        "modelled step; eplb: DeepSeek's placement, computed anew each time; static: no replicas, for comparison. A "
        "number, as in eplb,10, makes it choose every 10 steps instead of in each step.",
    )
    group.add_argument(
        "--moe-placement-threshold",
        type=float,
        default=1.15,
        metavar="R",
        help="flexmoe changes the placement if the busiest rank has more than R times the mean tokens (1.15).",
    )
    group.add_argument(
        "--moe-placement-speeds",
        type=float,
        nargs=2,
        metavar="SPEED",
        help="TFLOP/s that a rank computes in its experts, and GB/s that it sends, for flexmoe's model of a step. "
        "Default: measured when training starts; with given speeds a run can be repeated exactly.",
    )


def _placement(text: str) -> tuple[str, int]:
    """Return the method and the steps between its choices of "NAME" or "NAME,N"."""
    name, _, steps = text.partition(",")
    if name not in PLACEMENTS or (text != name and (not steps.isdecimal() or int(steps) < 1)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one of {', '.join(PLACEMENTS)}, alone or with a number of steps, such as eplb,10"
        )
    return name, int(steps or 1)


def resolve(options: PlacementOptions, run: RunConfig) -> PlacementConfig:
    """Return the placement of experts. Raises ValueError for values out of range."""
    check_slots(FLAG, options.moe_expert_slots, options.num_experts, options.expert_model_parallel_size)
    if not 1 <= options.moe_placement_threshold < math.inf:
        raise ValueError(f"--moe-placement-threshold {options.moe_placement_threshold:g} must be at least 1")
    tflops, link = options.moe_placement_speeds or (TFLOPS, LINK_BYTES_PER_SECOND / 1e9)
    if not (0 < tflops < math.inf and 0 < link < math.inf):
        raise ValueError(f"--moe-placement-speeds {tflops:g} {link:g} must be positive and finite")
    cost = ExpertCost.of(run.shape, tflops * 1e12, link * 1e9)
    name, interval = options.moe_placement
    placing = PlacementSettings(name, options.moe_expert_slots, options.moe_placement_threshold, interval, cost)
    measures = options.moe_placement_speeds is None and name == FLEXMOE  # only flexmoe uses costs
    return PlacementConfig(options.num_experts, options.expert_model_parallel_size, placing, measures)


def build(training: Training, runtime: Runtime) -> Training:
    """Keep experts in slots, and place replicas at the end of a step."""
    from megatron.bytescale.features.experts.loads import follow_loads

    return follow_loads(training, runtime)


_NO_TOKEN_LOST = "remove it: every token goes to a slot, and none is dropped or padded"
REFUSALS = (
    refuse("--expert-model-parallel-size 1", "experts", "give 2 or more: replicas are on other ranks",
           equals("expert_model_parallel_size", 1)),
    refuse("--moe-flex-dispatcher-backend ncclep", "experts", "use deepep or hybridep: ncclep needs a capacity",
           NCCLEP),
    *(refuse(flag, "experts", _NO_TOKEN_LOST) for flag in (
        "--moe-expert-capacity-factor", "--moe-expert-rank-capacity-factor", "--moe-pad-expert-input-to-capacity",
        "--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8")),
    refuse("--moe-router-fusion", "experts", "remove it: slots are filled from the router's own probabilities"),
    refuse("--moe-grouped-gemm with biases", "experts", "add --disable-bias-linear: a grouped product has no bias",
           given("moe_grouped_gemm") & given("add_bias_linear")),
    refuse("--moe-paged-stash", "experts", "remove it: it stores only the activations of home experts"),
    refuse("--delay-wgrad-compute", "experts", "remove it: replicas send weight gradients in the backward pass"),
    refuse("gradient accumulation fusion", "experts", "add --no-gradient-accumulation-fusion: gradients of replicas "
           "are added to a home's before they are accumulated", given("gradient_accumulation_fusion")),
    *(refuse(flag, "experts", "use --use-distributed-optimizer") for flag in (
        "--use-megatron-fsdp", "--use-torch-fsdp2")),
    *(refuse(f"--{name}-format", "experts", "use bf16: replicas have no scaling factors", given(name))
      for name in ("fp8", "fp4")),
)  # fmt: skip

EXPERTS = Feature(
    name="experts",
    flag=FLAG,
    summary="replicas of busy experts on ranks with less work (FlexMoE)",
    add_arguments=add_arguments,
    is_on=chosen("moe_expert_slots"),
    options=PlacementOptions,
    resolve=resolve,
    build=build,
    refusals=REFUSALS,
)
