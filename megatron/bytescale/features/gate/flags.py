"""Routers that start dense and become sparse (DTS-Gate, Nie et al. 2021)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.experts.gate import EXP, LINEAR, SCHEDULES, DenseToSparse
from megatron.bytescale.arguments.conditions import NCCLEP, chosen, equals, where
from megatron.bytescale.arguments.layer_settings import Balancing
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

FLAG = "--moe-dts-steps"
DEEPEP_CHOICES = 32
"""The most experts to which DeepEP sends a token: each thread of a warp copies one choice."""


@dataclass(frozen=True)
class GateOptions:
    """Flags of the gate, and Megatron's flags of the final router.

    Attributes:
        moe_dts_steps: number of steps until the final router.
        moe_dts_temperature: temperatures of the first and the last step, and the shape of the fall if it was given.
        moe_dts_threshold: minimum score of an expert that is kept, and maximum number of experts per token; None:
            all experts.
        moe_dts_noise: whether noise is added to logits.
        num_experts: experts of a layer.
        moe_router_topk: experts per token after the last step.
        seed: seed of the run.
        moe_token_dispatcher_type, moe_flex_dispatcher_backend: exchange of tokens.
        expert_tensor_parallel_size, tensor_model_parallel_size: ranks that share an expert, and a layer.
    """

    moe_dts_steps: int
    moe_dts_temperature: Sequence[float | str]
    moe_dts_threshold: tuple[float, int | None]
    moe_dts_noise: bool
    num_experts: int
    moe_router_topk: int
    seed: int
    moe_token_dispatcher_type: str = "allgather"
    moe_flex_dispatcher_backend: str = "deepep"
    expert_tensor_parallel_size: int | None = None
    tensor_model_parallel_size: int = 1

    @property
    def choices(self) -> int:
        """The most experts of a token that the dispatcher allows."""
        if (self.moe_token_dispatcher_type, self.moe_flex_dispatcher_backend) != ("flex", "deepep"):
            return self.num_experts
        return DEEPEP_CHOICES // (self.expert_tensor_parallel_size or self.tensor_model_parallel_size)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the gate."""
    group = parser.add_argument_group("bytescale: gates that start dense")
    group.add_argument(
        FLAG,
        type=int,
        metavar="N",
        help="Anneal the router in the first N steps. It starts with all experts for each token, weighted by a softmax "
        "of high temperature. As the temperature falls, experts below --moe-dts-threshold are dropped. After N steps "
        "Megatron's own router takes over; --moe-router-topk 1 --moe-router-pre-softmax makes it end with one expert.",
    )
    group.add_argument(
        "--moe-dts-temperature",
        type=_temperature,
        nargs="+",
        default=[2.0, 0.3],
        metavar="T",
        help="Temperatures of the first and of the last step (2.0 0.3). The temperature falls by a factor per step; "
        f"with a third word, as in 2.0 0.3 {LINEAR}, it falls linearly.",
    )
    group.add_argument(
        "--moe-dts-threshold",
        type=_threshold,
        default=(1e-3, None),
        metavar="S[,K]",
        help="Drop experts with a smaller score (0.001); it must be below 1 / --num-experts. With a number, as in "
        "0.001,8, a token keeps at most 8 experts.",
    )
    group.add_argument(
        "--moe-dts-noise",
        action="store_true",
        help="Add Gumbel noise to the logits while the gate anneals, only in training. It depends on --seed, step, "
        "layer, expert and token, not on ranks.",
    )


def _temperature(word: str) -> float | str:
    """Return a temperature, or the name of a schedule."""
    return word if word in SCHEDULES else float(word)


def _threshold(text: str) -> tuple[float, int | None]:
    """Return score and maximum number of experts of "S" or "S,K"."""
    score, comma, most = text.partition(",")
    return float(score), int(most) if comma else None


def _schedule(words: Sequence[float | str]) -> tuple[float, float, str]:
    """Return first and last temperature, and the shape of the fall. Raises ValueError for other words."""
    match words:
        case (float(high), float(low), *shape) if len(shape) < 2 and 0 < low <= high < math.inf:
            if all(isinstance(one, str) for one in shape):
                return high, low, str(shape[0]) if shape else EXP
    text = " ".join(f"{one:g}" if isinstance(one, float) else one for one in words)
    raise ValueError(
        f"--moe-dts-temperature {text}: give two temperatures above 0, in falling order, and {LINEAR} if wanted"
    )


def resolve(options: GateOptions, run: RunConfig) -> DenseToSparse:
    """Return the gate's annealing. Raises ValueError for values out of range."""
    high, low, schedule = _schedule(options.moe_dts_temperature)
    score, most_given = options.moe_dts_threshold
    if options.moe_dts_steps < 1:
        raise ValueError(f"{FLAG} {options.moe_dts_steps} must be at least 1")
    if not 0 < score < 1 / options.num_experts:
        raise ValueError(
            f"--moe-dts-threshold {score:g} must be above 0 and below {1 / options.num_experts:g}, "
            f"the score of each of {options.num_experts} equal experts"
        )
    most = options.num_experts if most_given is None else most_given
    if not options.moe_router_topk <= most <= options.num_experts:
        raise ValueError(
            f"--moe-dts-threshold {score:g},{most}: the number must be from --moe-router-topk "
            f"{options.moe_router_topk} to {options.num_experts}"
        )
    if most > options.choices:
        raise ValueError(
            f"--moe-token-dispatcher-type flex: DeepEP sends a token to at most {options.choices} experts here: "
            f"give --moe-dts-threshold {score:g},{options.choices}, or --moe-flex-dispatcher-backend hybridep"
        )
    seed = options.seed if options.moe_dts_noise else None
    return DenseToSparse(high, low, schedule, options.moe_dts_steps, score, most, seed)


def build(training: Training, runtime: Runtime) -> Training:
    """Anneal the routers of all layers."""
    from megatron.bytescale.features.gate.build import anneal

    return anneal(training, runtime)


_VARIES = "remove it: during annealing, tokens have different numbers of experts"
_BY_LOADS = {"sinkhorn", "quantile_balancing", "global_aux_loss"}
"""Load-balancing types that choose experts themselves, or that use statistics of top-k choices."""


REFUSALS = (
    refuse("--moe-flex-dispatcher-backend ncclep", "gate", "use deepep or hybridep: ncclep needs a capacity", NCCLEP),
    *(refuse(flag, "gate", _VARIES) for flag in (
        "--moe-expert-capacity-factor", "--moe-expert-rank-capacity-factor", "--moe-pad-expert-input-to-capacity",
        "--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8", "--moe-paged-stash",
        "--moe-router-num-groups", "--moe-router-topk-scaling-factor")),
    refuse("--moe-router-fusion", "gate", "remove it: the fused router supports only top-k"),
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
    is_on=chosen("moe_dts_steps"),
    options=GateOptions,
    resolve=resolve,
    build=build,
    refusals=REFUSALS,
)
