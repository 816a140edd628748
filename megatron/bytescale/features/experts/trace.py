"""Records the number of tokens of each expert in each step, for ``bytescale experts``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.config.experts import TraceTo
from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.experts.trace import TraceHead, head_of
from megatron.bytescale.arguments.conditions import chosen, equals, given
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.arguments.values import check_file
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

FLAG = "--moe-placement-trace"


@dataclass(frozen=True)
class TraceOptions:
    """The flag of the record, and Megatron's sizes of the experts.

    Attributes:
        moe_placement_trace: file of the record.
        num_experts: experts of a layer.
        moe_router_topk: experts per token.
        expert_model_parallel_size: ranks over which experts are distributed.
    """

    moe_placement_trace: Path
    num_experts: int
    moe_router_topk: int
    expert_model_parallel_size: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the record."""
    group = parser.add_argument_group("bytescale: loads of experts")
    group.add_argument(
        FLAG,
        type=Path,
        metavar="FILE",
        help="Append to FILE the number of tokens that each expert of each layer gets from each rank in each step, "
        "including padding, for `bytescale experts`. If several groups of ranks hold all experts, the first writes.",
    )


def resolve(options: TraceOptions, run: RunConfig) -> TraceTo:
    """Return the settings of the record. Raises ValueError if its file cannot be written or has another model."""
    path = options.moe_placement_trace
    check_file(FLAG, path)
    head = TraceHead(options.num_experts, options.moe_router_topk, options.expert_model_parallel_size)
    if path.exists() and path.stat().st_size and (existing := head_of(path)) != head:
        raise ValueError(f"{FLAG} {path} is of another run: it has {existing}, this run {head}; choose another file")
    return TraceTo(path, head)


def build(training: Training, runtime: Runtime) -> Training:
    """Count tokens in each layer of experts, and write the counts at the end of a step."""
    from megatron.bytescale.features.experts.loads import record_loads

    return record_loads(training, runtime)


_ALL = "expert_trace experts gate"  # all three change the layers of experts
_COUNTED = "remove it: tokens are counted where the router of a layer runs"
REFUSALS = (
    refuse("dense models", _ALL, "add --num-experts", ~given("num_experts")),
    refuse("--spec", _ALL, "remove it: {} changes Megatron's own layer spec"),
    refuse("--mtp-num-layers without --hybrid-data-parallel", _ALL, "add --hybrid-data-parallel, which also changes "
           "these layers", given("mtp_num_layers") & ~given("hybrid_data_parallel")),
    refuse("--cuda-graph-impl", _ALL, _COUNTED, ~equals("cuda_graph_impl", "none")),
    *(refuse(flag, _ALL, _COUNTED) for flag in ("--enable-cuda-graph", "--external-cuda-graph")),
)  # fmt: skip

EXPERT_TRACE = Feature(
    name="expert_trace",
    flag=FLAG,
    summary="records the number of tokens of each expert",
    add_arguments=add_arguments,
    is_on=chosen("moe_placement_trace"),
    options=TraceOptions,
    resolve=resolve,
    build=build,
    refusals=REFUSALS,
)
