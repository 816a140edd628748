"""Routers that start dense and become sparse (DTS-Gate, Nie et al. 2021)."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.experts.gate import EXP, FINALS, SCHEDULES, TOP1, TOPK, DenseToSparse
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

FLAG = "--moe-router-dts"


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


def before_checks(args: Any) -> None:
    """Make Megatron's router that of one expert where the gate ends so."""
    if args.moe_dts_final == TOP1:
        args.moe_router_topk, args.moe_router_pre_softmax = 1, True


def resolve(args: Any, run: RunConfig) -> DenseToSparse:
    """Return how the gate anneals. Raises ValueError for values out of range."""
    high, low = args.moe_dts_temperature
    if not 0 < low <= high < math.inf:
        raise ValueError(f"--moe-dts-temperature {high:g} {low:g}: give a temperature, and a lower one above 0")
    if args.moe_dts_steps is None or args.moe_dts_steps < 1:
        raise ValueError(f"{FLAG} needs --moe-dts-steps of at least 1")
    if not 0 < args.moe_dts_threshold < 1 / args.num_experts:
        raise ValueError(
            f"--moe-dts-threshold {args.moe_dts_threshold:g} must be above 0 and below {1 / args.num_experts:g}, the "
            f"score of {args.num_experts} equal experts"
        )
    most = args.num_experts if args.moe_dts_max_experts is None else args.moe_dts_max_experts
    if not args.moe_router_topk <= most <= args.num_experts:
        raise ValueError(
            f"--moe-dts-max-experts {most} must be from --moe-router-topk {args.moe_router_topk} to {args.num_experts}"
        )
    seed = args.seed if args.moe_dts_noise else None
    return DenseToSparse(high, low, args.moe_dts_schedule, args.moe_dts_steps, args.moe_dts_threshold, most, seed)


def build(training: Training, runtime: Runtime) -> Training:
    """Anneal the routers of all layers."""
    from megatron.bytescale.features.gate.build import anneal

    return anneal(training, runtime)


_VARIES = "remove it: while the gate anneals, tokens have different numbers of experts"
_BY_LOADS = ("sinkhorn", "quantile_balancing", "global_aux_loss")


def _balances_by_choice(args: Any) -> bool:
    """Return whether the load balancing chooses experts by itself, or by statistics of top-k choices."""
    types = args.moe_router_load_balancing_type
    return any(one in _BY_LOADS for one in (types if isinstance(types, list) else [types]))


REFUSALS = (
    refuse("--moe-token-dispatcher-type flex", "gate", "use alltoall or allgather",
           lambda a: a.moe_token_dispatcher_type == "flex"),
    *(refuse(flag, "gate", _VARIES) for flag in (
        "--moe-expert-capacity-factor", "--moe-expert-rank-capacity-factor", "--moe-pad-expert-input-to-capacity",
        "--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8", "--moe-paged-stash",
        "--moe-router-num-groups", "--moe-router-topk-scaling-factor")),
    refuse("--moe-router-fusion", "gate", "remove it: the fused router knows top-k alone"),
    refuse("--moe-router-enable-expert-bias", "gate", "remove it: it follows the loads of top-k choices"),
    refuse("--moe-router-load-balancing-type", "gate", "use aux_loss, seq_aux_loss or none", _balances_by_choice),
    refuse("--moe-router-score-function sigmoid", "gate", "use softmax, as the gate does",
           lambda a: a.moe_router_score_function == "sigmoid"),
)  # fmt: skip

GATE = Feature(
    name="gate",
    flag=FLAG,
    summary="routers that start dense and become sparse (DTS-Gate)",
    add_arguments=add_arguments,
    is_on=lambda args: args.moe_router_dts,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    refusals=REFUSALS,
)
