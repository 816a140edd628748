"""What of the copies of paged states hides at the lengths of a corpus, and what ``--state-policy auto`` chooses."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bytescale_ext.measure.cost_file import check_same_model, read_cost
from bytescale_ext.plan.activation.load import LayerSettings, Machine, cost_of_rates, full_load
from bytescale_ext.plan.activation.policies import POLICIES, make_plan
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.evaluate.length_samplers import SAMPLERS, sample_documents
from bytescale_ext.plan.states.choice import StageProblem, StateChoice, StateProblem, all_options, choose_states
from bytescale_ext.plan.states.forecast import Room, StateCase
from bytescale_ext.plan.states.hiding import Hiding, computing_of, hiding
from bytescale_ext.plan.states.timeline import Speeds
from megatron.bytescale.cli.plan import read_lengths
from megatron.bytescale.cli.shared.inputs import size
from megatron.bytescale.cli.shared.model_flags import shape_of_flags

NUM_DRAWN = 4096
SEED = 1234
RATES = (650.0, 600.0, 500.0)


def add_corpus(parser: argparse.ArgumentParser) -> None:
    """Add the options about the micro-batches that copies hide behind."""
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--lengths", type=Path, metavar="FILE", help="say what hides for the documents of this .idx "
                         "or .npy file")  # fmt: skip
    lengths.add_argument("--sampler", metavar="NAME", help=f"the same for a distribution: {', '.join(SAMPLERS)}")
    parser.add_argument("--context", type=size, default=131072, metavar="S", help="most tokens of a document (128K)")
    parser.add_argument(
        "--tokens-per-rank",
        type=size,
        metavar="C",
        help="of a micro-batch on one rank (8K with documents); without documents, of one that long. The output then "
        "ends with what --state-policy auto would choose",
    )
    parser.add_argument("--activation-policy", default="none", metavar="P", help=f"{', '.join(POLICIES)} (none)")
    parser.add_argument("--cost-file", type=Path, metavar="F.json", help="of `bytescale profile`; default: --tflops")
    parser.add_argument("--tflops", type=float, nargs=3, default=RATES, metavar=("GEMM", "ATTENTION", "BACKWARD"),
                        help="without a cost file (650 600 500)")  # fmt: skip


def check_corpus(args: argparse.Namespace) -> None:
    """Raise ValueError for an unknown name, a rate out of range, or documents of nothing."""
    if args.sampler is not None and args.sampler not in SAMPLERS:
        raise ValueError(f"--sampler {args.sampler} is unknown; choose one of {', '.join(SAMPLERS)}")
    if args.activation_policy not in POLICIES:
        raise ValueError(
            f"--activation-policy {args.activation_policy} is unknown; choose one of {', '.join(POLICIES)}"
        )
    if not all(0 < rate < float("inf") for rate in args.tflops):
        raise ValueError(f"--tflops must be positive, got {' '.join(map(str, args.tflops))}")
    if args.tokens_per_rank is None and args.activation_policy != "none":
        raise ValueError("--activation-policy needs --tokens-per-rank")
    if args.tokens_per_rank is None and (args.lengths is not None or args.sampler is not None):
        args.tokens_per_rank = 8192


def cost_of(args: argparse.Namespace) -> ModelCost:
    """Return the costs of the model. Raises ValueError for a bad cost file or one of another model."""
    shape = shape_of_flags(args.model_flags)
    if args.cost_file is None:
        products, forward, backward = (1e12 * rate for rate in args.tflops)
        return cost_of_rates(shape, products, forward, backward, args.tensor_parallel)
    cost = read_cost(args.cost_file)
    return check_same_model(cost, shape, args.tensor_parallel, cost.dtype, args.cost_file)


def lengths_of(args: argparse.Namespace) -> list[int]:
    """Return lengths of documents, cut at ``--context``. Raises ValueError for a bad file or sampler."""
    if args.sampler is not None:
        return list(sample_documents(args.sampler, args.context, NUM_DRAWN, SEED))
    if args.lengths is None:
        return [args.tokens_per_rank]
    return [min(length, args.context) for length in read_lengths(args.lengths)]


def hidden_of(args: argparse.Namespace, case: StateCase, speeds: Speeds) -> Hiding:
    """Return what hides of a step of a stage."""
    return hiding(case, computing_of(cost_of(args), lengths_of(args), args.tokens_per_rank), args.microbatches, speeds)


def hiding_text(found: Hiding, speeds: Speeds) -> str:
    """Return a line about what hides."""
    total = found.num_bytes
    return (
        f"of {total / 1e9:.2f} GB that the fullest stage copies in a step, {found.computing_bytes / total:.1%} hides "
        f"behind computing and {found.adam_bytes / total:.1%} behind Adam; "
        f"{1e3 * found.waited_bytes / speeds.link_bytes_per_second:.1f} ms of the link are waited for"
    )


def auto_choice(args: argparse.Namespace, found: Sequence[StateCase], room: Room, speeds: Speeds) -> StateChoice:
    """Return what ``--state-policy auto`` chooses for micro-batches of ``--tokens-per-rank`` tokens in these budgets.

    ``found``: the states of each stage. Raises ValueError where nothing fits.
    """
    cost, last = cost_of(args), len(found) - 1
    stages = []
    for number, case in enumerate(found):
        how = LayerSettings(case.shape.num_layers, 2 * (number == last), last - number + 1,
                            loss_tokens=None if number == last else 0)  # fmt: skip
        load = full_load(cost, args.tokens_per_rank, args.tokens_per_rank, how)
        head = args.tokens_per_rank * (cost.head_forward + cost.head_backward) * (number == last)
        stages.append(StageProblem(case, load, partial(make_plan, args.activation_policy), head))
    machine = Machine(room.device_bytes, room.host_bytes, speeds.link_bytes_per_second)
    options = all_options((1, 2, 3), room.disk_bytes > 0)
    return choose_states(
        StateProblem(
            tuple(stages),
            machine,
            speeds,
            disk_bytes=room.disk_bytes,
            num_microbatches=args.microbatches,
            num_ranks=args.optimizer_ranks,
            options=options,
        )
    )
