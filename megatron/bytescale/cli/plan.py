"""``bytescale plan``: plan one step from document lengths, check it and print it. No GPU, no Megatron, no torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bytescale_ext.measure.cost_file import read_cost, shipped
from bytescale_ext.plan.cost.model_cost import ModelCost
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
from megatron.bytescale.cli.shared.slicing import add_slicing_arguments, setup_of_options

NAME = "plan"
HELP = "plan one step from document lengths, check the plan and print it"
EXAMPLE = "bytescale plan --lengths corpus_text_document.idx --num-sequences 512 --ranks 64 --tokens-per-rank 8192"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale plan``."""
    parser.add_argument(
        "--lengths",
        type=Path,
        required=True,
        metavar="FILE",
        help="tokens of each document: a Megatron index (.idx), or a one-dimensional array of integers (.npy)",
    )
    parser.add_argument("--ranks", type=count, required=True, metavar="N", help="HDP ranks (data x context parallel)")
    parser.add_argument(
        "--tokens-per-rank", type=size, required=True, metavar="C", help="the most tokens of a micro-batch on one rank"
    )
    parser.add_argument(
        "--tokens-multiple",
        type=count,
        default=1,
        metavar="M",
        help="pad micro-batches to a multiple of M: the tensor-parallel size with sequence parallelism (default: 1)",
    )
    parser.add_argument("--seq-length", type=size, metavar="S", help="cut longer documents into pieces of S tokens")
    parser.add_argument("--num-sequences", type=size, metavar="K", help="plan K documents of the file (default: all)")
    parser.add_argument("--start", type=int, default=0, metavar="I", help="first document of the file (default: 0)")
    parser.add_argument("--balance", metavar="NAME", help=planner_help())
    parser.add_argument(
        "--stages", type=count, default=1, metavar="P", help="pipeline stages; --ranks is the number of pipelines (1)"
    )
    add_slicing_arguments(parser)
    parser.add_argument(
        "--ranks-per-node", type=count, metavar="N", help="keep rings of up to N ranks inside nodes of N ranks"
    )
    add_cost_argument(parser)
    parser.add_argument(
        "--static-width",
        type=count,
        metavar="W",
        help="for comparison: plan static context parallelism of W ranks, as --context-parallel-size does",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON (read by bytescale timeline)")


def add_cost_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--cost-file``, which ``model_cost`` reads."""
    parser.add_argument(
        "--cost-file",
        type=Path,
        metavar="F.json",
        help="costs of the model, as bytescale profile writes them (default: the shipped ones of a 7B model)",
    )


def model_cost(path: Path | None) -> ModelCost:
    """Return the costs of the file that the user named, or the shipped ones. Raises ValueError for a bad file."""
    return shipped("bytescale_7b") if path is None else read_cost(path)


def run(args: argparse.Namespace) -> int:
    """Plan, check and print.

    Raises:
        ValueError: bad lengths, sizes, balance or cost file; PlanError (a ValueError) if the plan breaks a law, which
            is a bug.
    """
    lengths = cut_lengths(read_lengths(args.lengths, args.start, args.num_sequences), args.seq_length)
    cost = model_cost(args.cost_file)
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
    """Return the decision about the setup of the options. Raises ValueError for options that conflict."""
    setup = setup_of_options(args, cost, max(lengths))
    if args.static_width is not None and (args.balance or args.stages > 1):
        raise ValueError("--static-width does not work with --balance and --stages: remove them")
    names = ("auto", *planner_names())
    balance = args.balance or "auto"
    if balance not in names:
        raise ValueError(f"--balance {balance} is unknown; choose one of {', '.join(names)}")
    numerics = replace(setup.numerics, rows=args.tokens_multiple)
    return choose(replace(setup, numerics=numerics, planning=Planning(balance, args.static_width)))


def read_lengths(path: Path, start: int = 0, num_sequences: int | None = None) -> list[int]:
    """Return the tokens of documents ``start`` to ``start + num_sequences`` of an .idx or .npy file.

    Empty documents of an .idx file are left out, as in training: they give no sample.

    Raises:
        ValueError: the file is missing or of another kind, the window is outside it or holds no token, or a length of
            an .npy file is not positive.
    """
    if path.is_dir():
        raise ValueError(f"--lengths {path} is a folder; give one of its .idx or .npy files")
    if not path.exists():
        raise ValueError(f"--lengths {path}: no such file")
    if path.suffix == ".idx":
        from bytescale_ext.data.samples.lengths import read_idx_lengths

        values = np.asarray(read_idx_lengths(path))
    elif path.suffix == ".npy":
        values = _read_npy(path)
    else:
        raise ValueError(f"--lengths {path}: give a Megatron index (.idx) or a numpy array (.npy)")
    stop = len(values) if num_sequences is None else start + num_sequences
    if not 0 <= start < len(values):
        raise ValueError(f"--start {start}: {path} has {len(values)} documents, numbered from 0")
    if stop > len(values):
        raise ValueError(
            f"--num-sequences {num_sequences}: {path} has {len(values) - start} documents from document {start} on; "
            "give at most that many"
        )
    window = values[start:stop]
    if path.suffix == ".idx":
        window = window[window > 0]
        if not window.size:
            raise ValueError(f"--lengths {path}: documents {start} to {stop - 1} hold no token; choose others")
    if window.min() < 1:
        index = int(np.argmax(window < 1))
        raise ValueError(f"--lengths {path}: document {start + index} has {window[index]} tokens, at least 1 is needed")
    return [int(length) for length in window]


def cut_lengths(lengths: Sequence[int], seq_length: int | None) -> list[int]:
    """Return pieces of at most ``seq_length`` tokens of each document, in order; None: the documents."""
    if seq_length is None:
        return list(lengths)
    return [min(seq_length, length - begin) for length in lengths for begin in range(0, length, seq_length)]


def draw_pieces(lengths: Sequence[int], seq_length: int, count: int, seed: int) -> list[int]:
    """Return ``count`` of the pieces of ``cut_lengths`` at random, none twice while there are enough."""
    pieces = cut_lengths(lengths, seq_length)
    return [int(one) for one in np.random.default_rng(seed).choice(pieces, count, replace=len(pieces) < count)]


def summary_text(plan: StepPlan, summary: PlanSummary) -> str:
    """Return the figures of a plan, one on each line."""
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
    """Return the planned time of the step's passes, and its ratio to the lower bound of any plan."""
    setup, slicing = decision.setup, plan.slicing or decision.finest
    makespan = replay_stages(plan, stage_costs(setup), slicing).makespan
    bound = lower_bounds(plan.lengths, setup.cluster, stage_costs(setup), slicing).largest
    return f"makespan / bound        {makespan / bound:.3f} ({makespan:.4g} s / {bound:.4g} s, {setup.cost.device})"


def _spread(values: Sequence[int]) -> str:
    return f"min {min(values)}, mean {sum(values) / len(values):.1f}, max {max(values)}"


def _read_npy(path: Path) -> npt.NDArray[np.integer]:
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"--lengths {path} is not a numpy array: {error}") from error
    if not isinstance(values, np.ndarray) or values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        what = f"shape {values.shape} of {values.dtype}" if isinstance(values, np.ndarray) else "several arrays"
        raise ValueError(f"--lengths {path} holds {what}; it must be one-dimensional and of integers")
    return values
