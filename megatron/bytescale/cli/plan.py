"""``bytescale plan``: plan one step from document lengths, check it and print it, without GPU, Megatron and torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.replay import PlanSummary, replay_stages, summarize
from bytescale_ext.plan.hdp.table import planner_help, planner_names
from bytescale_ext.plan.setup.choose import Decision, choose
from bytescale_ext.plan.setup.costs import stage_costs
from bytescale_ext.plan.setup.planner import planner_of
from bytescale_ext.plan.setup.setup import Planning
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.show import plan_text
from megatron.bytescale.cli.shared.inputs import count, size
from megatron.bytescale.cli.shared.lengths import cut_lengths, read_lengths
from megatron.bytescale.cli.shared.options import add_option
from megatron.bytescale.cli.shared.slicing import add_setup_arguments, cost_of_options, setup_of_options

NAME = "plan"
HELP = "plan one step from document lengths, check the plan and print it"
EXAMPLE = "bytescale plan --lengths corpus_text_document.idx --num-sequences 512 --ranks 64 --tokens-per-rank 8192"

MOST_SHOWN: Final = 1 << 16
"""Ranks of a plan that is printed, with a row each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale plan``."""
    add_option(parser, "--lengths", required=True)
    parser.add_argument("--start", type=int, default=0, metavar="I", help="first document of the file (default: 0)")
    parser.add_argument(
        "--num-sequences", type=size, metavar="K", help="number of documents (default: all of the file)"
    )
    add_option(parser, "--seq-length", note="longer documents are cut into pieces (default: no cuts)")
    add_setup_arguments(parser)
    parser.add_argument("--balance", metavar="NAME", help=planner_help())
    parser.add_argument(
        "--static-width",
        type=count,
        metavar="W",
        help="for comparison: static context parallelism of W ranks, as with --context-parallel-size",
    )
    parser.add_argument(
        "--tokens-multiple",
        type=count,
        default=1,
        metavar="M",
        help="pad micro-batches to a multiple of M: the tensor-parallel size with sequence parallelism (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, the input of bytescale timeline")


def run(args: argparse.Namespace) -> int:
    """Plan a step, check the plan and print it.

    Raises:
        ValueError: bad lengths, sizes, balance or cost file.
        PlanError: the plan breaks a rule, which is a bug.
    """
    if args.ranks > MOST_SHOWN:
        raise ValueError(
            f"--ranks {args.ranks}: a plan is printed for at most {MOST_SHOWN:,} ranks; bytescale simulate summarizes "
            "steps on more"
        )
    lengths = cut_lengths(read_lengths(args.lengths, args.start, args.num_sequences), args.seq_length)
    cost = cost_of_options(args)
    decision = decision_of(args, cost, lengths)
    plan = planner_of(decision)(lengths)
    check_step_plan(plan, lengths, args.tokens_multiple, ranks_per_node=args.ranks_per_node)
    if args.json:
        print(json.dumps(plan.to_json()))
        return 0
    print(plan_text(plan))
    print(summary_text(plan, summarize(plan, cost.whole().both, args.tokens_multiple)))
    print(score_text(plan, decision))
    return 0


def decision_of(args: argparse.Namespace, cost: ModelCost, lengths: Sequence[int]) -> Decision:
    """Return the decision for the setup of the options. Raises ValueError for options that conflict."""
    setup = setup_of_options(args, cost, max(lengths))
    if args.static_width is not None and (args.balance or args.pipeline_parallel > 1):
        raise ValueError("--static-width does not work with --balance and --pipeline-parallel: remove them")
    names = ("auto", *planner_names())
    balance = args.balance or "auto"
    if balance not in names:
        raise ValueError(f"--balance {balance} is unknown; choose one of {', '.join(names)}")
    numerics = replace(setup.numerics, rows=args.tokens_multiple)
    return choose(replace(setup, numerics=numerics, planning=Planning(balance, args.static_width)))


def summary_text(plan: StepPlan, summary: PlanSummary) -> str:
    """Return the figures of a plan, a line each."""
    return "\n".join(
        (
            f"micro-batches per rank  {_spread(summary.micro_batches_per_rank)}",
            f"tokens per rank         {_spread(summary.tokens_per_rank)}",
            f"filled                  {summary.fill_share:.1%} of C in the mean micro-batch",
            f"padding                 {summary.padding_share:.2%} of the padded tokens",
            f"planned imbalance       {summary.imbalance:.3f} (makespan / mean busy time, without pipelines)",
            *([] if plan.slicing is None else [f"slices                  {plan.slicing}"]),
            f"digest                  {plan.digest()}",
        )
    )


def score_text(plan: StepPlan, decision: Decision) -> str:
    """Return the planned time of the passes of a step, and its ratio to the lower bound of all plans."""
    setup, slicing = decision.setup, plan.slicing or decision.finest
    table = ShardTable.of(plan).at(setup.cluster.unequal_speeds())
    makespan = replay_stages(table, stage_costs(setup), slicing).makespan
    bound = lower_bounds(plan.lengths, setup.cluster, stage_costs(setup), slicing).largest
    return f"makespan / bound        {makespan / bound:.3f} ({makespan:.4g} s / {bound:.4g} s, {setup.cost.device})"


def _spread(values: Sequence[int]) -> str:
    return f"min {min(values)}, mean {sum(values) / len(values):.1f}, max {max(values)}"
