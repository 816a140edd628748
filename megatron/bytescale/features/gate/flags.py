"""Routers that start dense and become sparse (DTS-Gate, Nie et al. 2021)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.experts.gate import EXP, FINALS, SCHEDULES, TOP1, TOPK, DenseToSparse
from megatron.bytescale.arguments.conditions import equals, given, where
from megatron.bytescale.arguments.layer_settings import Balancing
from megatron.bytescale.arguments.options import NO_OVERRIDES, Overrides
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

FLAG = "--moe-router-dts"


@dataclass(frozen=True)
class GateOptions:
    """Flags of the gate, and Megatron's flags of the router that it becomes.

    Attributes:
        moe_dts_temperature: temperatures of the first step and of the last one.
        moe_dts_schedule: how the temperature falls.
        moe_dts_steps: steps until the router is Megatron's.
        moe_dts_threshold: least score of an expert that is not dropped.
        moe_dts_max_experts: most experts of a token.
        moe_dts_final: router after the last step.
        moe_dts_noise: noise is added to logits.
        num_experts: experts of a layer.
        moe_router_topk: experts of a token after the last step.
        seed: seed of the run.
    """

    moe_dts_temperature: Sequence[float]
    moe_dts_schedule: str
    moe_dts_steps: int | None
    moe_dts_threshold: float
    moe_dts_max_experts: int | None
    moe_dts_final: str
    moe_dts_noise: bool
    num_experts: int
    moe_router_topk: int
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the gate."""
    group = parser.add_argument_group("bytescale: gates that start dense")
    group.add_argument(
        FLAG,
        action="store_true",
        help="Begin with all experts for each token, weighted by a softmax of high temperature. As it falls, "
        "experts below --moe-dts-threshold are dropped; after --moe-dts-steps the router is Megatron's own top-k.",
    )
    group.add_argument(
        "--moe-dts-temperature",
        type=float,
        nargs=2,
        default=[2.0, 0.3],
        metavar="T",
        help="Temperature of the first step, and the one that it falls to (2.0 0.3).",
    )
    group.add_argument(
        "--moe-dts-schedule", choices=SCHEDULES, default=EXP, help="How it falls: by a factor each step, or linearly."
    )
    group.add_argument("--moe-dts-steps", type=int, metavar="N", help="Steps until the router is Megatron's.")
    group.add_argument(
        "--moe-dts-threshold",
        type=float,
        default=1e-3,
        metavar="S",
        help="Experts with a smaller score are dropped (0.001); below 1 / --num-experts.",
    )
    group.add_argument(
        "--moe-dts-max-experts", type=int, metavar="K", help="The most experts of a token. Default: all of them."
    )
    group.add_argument(
        "--moe-dts-final",
        choices=FINALS,
        default=TOPK,
        help="The router after the last step: topk (default) as Megatron's flags say; top1 sets --moe-router-topk 1 "
        "--moe-router-pre-softmax.",
    )
    group.add_argument(
        "--moe-dts-noise",
        action="store_true",
        help="Add Gumbel noise to the logits while the gate anneals, in training alone. It depends on --seed, step, "
        "layer, expert and token, not on ranks.",
    )


def before_checks(options: GateOptions) -> Overrides:
    """Return the router of Megatron that the gate becomes, if that is not the router of the command line."""
    return {"moe_router_topk": 1, "moe_router_pre_softmax": True} if options.moe_dts_final == TOP1 else NO_OVERRIDES


def resolve(options: GateOptions, run: RunConfig) -> DenseToSparse:
    """Return how the gate anneals. Raises ValueError for values out of range."""
    high, low = options.moe_dts_temperature
    if not 0 < low <= high < math.inf:
        raise ValueError(f"--moe-dts-temperature {high:g} {low:g}: give a temperature, and a lower one above 0")
    if options.moe_dts_steps is None or options.moe_dts_steps < 1:
        raise ValueError(f"{FLAG} needs --moe-dts-steps of at least 1")
    if not 0 < options.moe_dts_threshold < 1 / options.num_experts:
        raise ValueError(
            f"--moe-dts-threshold {options.moe_dts_threshold:g} must be above 0 and below {1 / options.num_experts:g}, "
            f"the score of {options.num_experts} equal experts"
        )
    most = options.num_experts if options.moe_dts_max_experts is None else options.moe_dts_max_experts
    if not options.moe_router_topk <= most <= options.num_experts:
        raise ValueError(
            f"--moe-dts-max-experts {most} must be from --moe-router-topk {options.moe_router_topk} to "
            f"{options.num_experts}"
        )
    seed = options.seed if options.moe_dts_noise else None
    return DenseToSparse(
        high, low, options.moe_dts_schedule, options.moe_dts_steps, options.moe_dts_threshold, most, seed
    )


def build(training: Training, runtime: Runtime) -> Training:
    """Anneal the routers of all layers."""
    from megatron.bytescale.features.gate.build import anneal

    return anneal(training, runtime)


_VARIES = "remove it: while the gate anneals, tokens have different numbers of experts"
_BY_LOADS = {"sinkhorn", "quantile_balancing", "global_aux_loss"}
"""Ways of balancing that choose experts themselves, or by statistics of top-k choices."""


REFUSALS = (
    refuse("--moe-token-dispatcher-type flex", "gate", "use alltoall or allgather",
           equals("moe_token_dispatcher_type", "flex")),
    *(refuse(flag, "gate", _VARIES) for flag in (
        "--moe-expert-capacity-factor", "--moe-expert-rank-capacity-factor", "--moe-pad-expert-input-to-capacity",
        "--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8", "--moe-paged-stash",
        "--moe-router-num-groups", "--moe-router-topk-scaling-factor")),
    refuse("--moe-router-fusion", "gate", "remove it: the fused router knows top-k alone"),
    refuse("--moe-router-enable-expert-bias", "gate", "remove it: it follows the loads of top-k choices"),
    refuse("--moe-router-load-balancing-type", "gate", "use aux_loss, seq_aux_loss or none",
           where(Balancing, lambda balancing: bool(balancing.ways & _BY_LOADS))),
    refuse("--moe-router-score-function sigmoid", "gate", "use softmax, as the gate does",
           equals("moe_router_score_function", "sigmoid")),
)  # fmt: skip

GATE = Feature(
    name="gate",
    flag=FLAG,
    summary="routers that start dense and become sparse (DTS-Gate)",
    add_arguments=add_arguments,
    is_on=given("moe_router_dts"),
    options=GateOptions,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    refusals=REFUSALS,
)
