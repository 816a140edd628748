"""What of the copies of paged states hides at the lengths of a corpus, and what ``--state-policy auto`` chooses."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from bytescale_ext.measure.cost_file import check_same_model, read_cost
from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.activation.policies import POLICIES
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.evaluate.length_samplers import SAMPLERS, sample_documents
from bytescale_ext.plan.setup.choose import choose
from bytescale_ext.plan.setup.setup import AUTO, Budget, Policy, Setup, equal_layers
from bytescale_ext.plan.states.choice import StateChoice
from bytescale_ext.plan.states.forecast import StateCase
from bytescale_ext.plan.states.hiding import Hiding, computing_of, hiding
from bytescale_ext.plan.states.pages import page_bytes_of
from bytescale_ext.plan.states.step_time import StateOption
from bytescale_ext.plan.states.timeline import Speeds
from megatron.bytescale.cli.plan import read_lengths
from megatron.bytescale.cli.shared.inputs import size
from megatron.bytescale.cli.shared.model_flags import USUAL_TOKENS, setup_of_model, shape_of_flags

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


def setup_of_options(args: argparse.Namespace) -> Setup:
    """Return the setup of the options: what training resolves of the model's flags on this mesh.

    Raises:
        ValueError: flags that training refuses, stages that do not divide the layers, or a bad cost file.
    """
    tensor, stages, ranks = args.tensor_parallel, args.stages, args.optimizer_ranks
    tokens = args.tokens_per_rank or USUAL_TOKENS
    words = ["--tensor-model-parallel-size", tensor, *["--sequence-parallel"] * (tensor > 1)]
    words += ["--pipeline-model-parallel-size", stages, *["--use-distributed-optimizer"] * (ranks > 1)]
    words += ["--hdp-tokens-per-rank", tokens, "--seq-length", tokens, "--max-position-embeddings", tokens]
    words += ["--bf16"] if not args.float32 else []
    equal = equal_layers(shape_of_flags(args.model_flags), stages)
    setup = setup_of_model(args.model_flags, [str(word) for word in words], tensor * stages * ranks)
    budget = Budget(
        args.device_memory_gb * 1e9,
        args.host_memory_gb * 1e9,
        args.nvme_gb * 1e9,
        args.link_gb_per_second * 1e9,
    )
    states = replace(
        setup.states,
        option=StateOption(args.state_stage, args.window_layers),
        page_bytes=page_bytes_of(args.page_mb, "--page-mb"),
        update_steps=args.update_steps,
        has_disk=args.nvme_gb > 0,
        speeds=speeds_of(args),
    )
    return replace(
        setup,
        mesh=replace(setup.mesh, stage_layers=equal),
        cost=cost_of(args, setup),
        measured=args.cost_file is not None,
        sequences=replace(setup.sequences, micro_batches=args.microbatches),
        budget=budget,
        policy=Policy(args.activation_policy),
        states=states,
    )


def speeds_of(args: argparse.Namespace) -> Speeds:
    """Return the speeds of the options."""
    names = ("link", "adam", "nvme_read", "nvme_write")
    return Speeds(*(getattr(args, f"{name}_gb_per_second") * 1e9 for name in names))


def cost_of(args: argparse.Namespace, setup: Setup) -> ModelCost:
    """Return the seconds of the model. Raises ValueError for a bad cost file or one of another model."""
    if args.cost_file is None:
        products, forward, backward = (1e12 * rate for rate in args.tflops)
        return cost_of_rates(setup.shape, products, forward, backward, args.tensor_parallel)
    cost = read_cost(args.cost_file)
    return check_same_model(cost, setup.shape, args.tensor_parallel, cost.dtype, args.cost_file)


def automatic(setup: Setup) -> StateChoice:
    """Return the choice of ``--state-policy auto``, which training makes too. Raises ValueError if nothing fits."""
    states = choose(replace(setup, states=replace(setup.states, option=AUTO))).states
    assert states is not None, "model states are left open"
    return states


def lengths_of(args: argparse.Namespace) -> list[int]:
    """Return lengths of documents, cut at ``--context``. Raises ValueError for a bad file or sampler."""
    if args.sampler is not None:
        return list(sample_documents(args.sampler, args.context, NUM_DRAWN, SEED))
    if args.lengths is None:
        return [args.tokens_per_rank]
    return [min(length, args.context) for length in read_lengths(args.lengths)]


def hidden_of(args: argparse.Namespace, setup: Setup, case: StateCase) -> Hiding:
    """Return the copies of a step of a stage that overlap with computation."""
    computing = computing_of(setup.cost, lengths_of(args), args.tokens_per_rank)
    return hiding(case, computing, args.microbatches, setup.states.speeds)


def hiding_text(found: Hiding, speeds: Speeds) -> str:
    """Return a line about what hides."""
    total = found.num_bytes
    return (
        f"of {total / 1e9:.2f} GB that the fullest stage copies in a step, {found.computing_bytes / total:.1%} hides "
        f"behind computing and {found.adam_bytes / total:.1%} behind Adam; "
        f"{1e3 * found.waited_bytes / speeds.link_bytes_per_second:.1f} ms of the link are waited for"
    )
