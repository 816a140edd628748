"""Overlap of paged states with the computation of a corpus, and the choice of ``--state-policy auto``."""

from __future__ import annotations

import argparse
from dataclasses import replace

from bytescale_ext.measure.cost_file import check_same_model, read_cost
from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.activation.policies import POLICIES
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.evaluate.length_samplers import sample_documents
from bytescale_ext.plan.setup.choose import choose
from bytescale_ext.plan.setup.setup import AUTO, Budget, Policy, Setup, equal_layers
from bytescale_ext.plan.states.choice import StateChoice
from bytescale_ext.plan.states.forecast import StateCase
from bytescale_ext.plan.states.hiding import Hiding, computing_of, hiding
from bytescale_ext.plan.states.pages import page_bytes_of
from bytescale_ext.plan.states.step_time import StateOption
from bytescale_ext.plan.states.timeline import Speeds
from megatron.bytescale.cli.shared.lengths import read_lengths
from megatron.bytescale.cli.shared.model_flags import USUAL_TOKENS, setup_of_model, shape_of_flags
from megatron.bytescale.cli.shared.options import add_lengths, add_option, add_rates, check_rates, check_sampler

NUM_DRAWN = 4096
SEED = 1234


def add_corpus(parser: argparse.ArgumentParser) -> None:
    """Add the options of the micro-batches that overlap with copies."""
    add_lengths(parser, note="adds the overlap of copies with their computation to the output")
    add_option(parser, "--seq-length", default=131072, note="longer documents are cut")
    add_option(
        parser, "--tokens-per-rank",
        note="8192 with documents, else one document of C tokens; adds the choice of --state-policy auto to the output",
    )  # fmt: skip
    add_option(parser, "--activation-policy", default="none")
    add_option(parser, "--cost-file", note="default: --tflops, else the costs of a known device")
    add_rates(parser)


def check_corpus(args: argparse.Namespace) -> None:
    """Raise ValueError for an unknown name, a rate out of range, or a policy without micro-batches."""
    check_sampler(args.sampler)
    if args.activation_policy not in POLICIES:
        raise ValueError(
            f"--activation-policy {args.activation_policy} is unknown; choose one of {', '.join(POLICIES)}"
        )
    check_rates(args.tflops)
    if args.tokens_per_rank is None and args.activation_policy != "none":
        raise ValueError("--activation-policy needs --tokens-per-rank")
    if args.tokens_per_rank is None and (args.lengths is not None or args.sampler is not None):
        args.tokens_per_rank = 8192


def setup_of_options(args: argparse.Namespace) -> Setup:
    """Return the setup of the options, as training resolves it from the flags of the model.

    Raises:
        ValueError: flags that training refuses, stages that do not divide the layers, or a bad cost file.
    """
    tensor, stages, ranks = args.tensor_parallel, args.pipeline_parallel, args.optimizer_ranks
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
        cluster=replace(setup.cluster, ranks_per_node=args.ranks_per_node),
        cost=model_cost_of(args, setup),
        measured=args.cost_file is not None,
        sequences=replace(setup.sequences, micro_batches=args.micro_batches),
        budget=budget,
        policy=Policy(args.activation_policy),
        states=states,
    )


def speeds_of(args: argparse.Namespace) -> Speeds:
    """Return the speeds of the options."""
    names = ("link", "adam", "nvme_read", "nvme_write")
    return Speeds(*(getattr(args, f"{name}_gb_per_second") * 1e9 for name in names))


def model_cost_of(args: argparse.Namespace, setup: Setup) -> ModelCost:
    """Return the costs of the model. Raises ValueError for a bad cost file or the cost file of another model."""
    if args.cost_file is None and args.tflops is None:
        return setup.cost
    if args.cost_file is None:
        products, forward, backward = (1e12 * rate for rate in args.tflops)
        return cost_of_rates(setup.shape, products, forward, backward, args.tensor_parallel)
    cost = read_cost(args.cost_file)
    return check_same_model(cost, setup.shape, args.tensor_parallel, cost.dtype, args.cost_file)


def automatic(setup: Setup) -> StateChoice:
    """Return the choice of ``--state-policy auto`` in training. Raises ValueError if no choice fits."""
    states = choose(replace(setup, states=replace(setup.states, option=AUTO))).states
    assert states is not None, "model states are left open"
    return states


def lengths_of(args: argparse.Namespace) -> list[int]:
    """Return document lengths, cut at ``--seq-length``. Raises ValueError for a bad file or sampler."""
    if args.sampler is not None:
        return list(sample_documents(args.sampler, args.seq_length, NUM_DRAWN, SEED))
    if args.lengths is None:
        return [args.tokens_per_rank]
    return [min(length, args.seq_length) for length in read_lengths(args.lengths)]


def overlap_of(args: argparse.Namespace, setup: Setup, case: StateCase) -> Hiding:
    """Return the copies of a step of a stage that overlap with computation."""
    computing = computing_of(setup.cost, lengths_of(args), args.tokens_per_rank)
    return hiding(case, computing, args.micro_batches, setup.states.speeds)


def overlap_text(overlap: Hiding, speeds: Speeds) -> str:
    """Return a line about the overlap of copies."""
    total = overlap.num_bytes
    return (
        f"of {total / 1e9:.2f} GB that the fullest stage copies in a step, {overlap.computing_bytes / total:.1%} "
        f"overlap with computation and {overlap.adam_bytes / total:.1%} with Adam; "
        f"the step waits {1e3 * overlap.waited_bytes / speeds.link_bytes_per_second:.1f} ms for the link"
    )
