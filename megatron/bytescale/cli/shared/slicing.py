"""The options of a setup that is planned without Megatron's flags, and of its slices."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bytescale_ext.measure.cost_file import read_cost
from bytescale_ext.measure.devices import DEFAULT_DEVICE, device_cost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.setup.memory import affordable_keys
from bytescale_ext.plan.setup.setup import AUTO, Budget, Setup, setup_of_cost
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing
from megatron.bytescale.cli.shared.inputs import count
from megatron.bytescale.cli.shared.options import add_costs, add_option, check_device
from megatron.bytescale.features.slices.flags import slices_value


def add_slices_arguments(parser: argparse.ArgumentParser, text: str, kind: Callable[[str], int | str] = count) -> None:
    """Add ``--slices`` with this help and type, and ``--eager``; ``slicing_of_options`` reads them."""
    parser.add_argument("--slices", type=kind, default=1, metavar="K", help=text)
    parser.add_argument(
        "--eager", action="store_true", help="each stage runs two forwards ahead of the next, as with --seq1f1b-eager"
    )


def slicing_of_options(args: argparse.Namespace) -> Slicing:
    """Return the slices of the options, without kept keys. Raises ValueError for fewer than 1."""
    if args.slices == AUTO:
        return ONE_SLICE
    if args.slices < 1:
        raise ValueError(f"--slices {args.slices} must be at least 1")
    return Slicing(args.slices, eager=args.eager)


def add_setup_arguments(parser: argparse.ArgumentParser, slices_note: str = "") -> None:
    """Add the options that ``setup_of_options`` reads.

    Args:
        parser: parser of the subcommand.
        slices_note: end of the help of ``--slices``.
    """
    add_option(
        parser, "--ranks", required=True,
        note="HDP ranks (data x context parallel), each a whole pipeline with --pipeline-parallel",
    )  # fmt: skip
    add_option(parser, "--tokens-per-rank", required=True)
    add_option(parser, "--pipeline-parallel")
    add_option(parser, "--ranks-per-node", note="rings of up to N ranks stay in one node (default: one node)")
    add_option(parser, "--speeds")
    text = f"slices of each micro-batch in a pipeline, as with --seq1f1b-slices (1); {AUTO}: the planner chooses"
    add_slices_arguments(parser, text + slices_note, slices_value)
    add_option(parser, "--device-memory-gb", note=f"needed with --slices {AUTO}, which subtracts the model states")
    parser.add_argument(
        "--kept-keys",
        type=int,
        metavar="TOKENS",
        help="keep the keys of documents of up to TOKENS tokens from slice to slice, as with --hdp-kept-keys "
        "(default: the most that takes no more memory than 1F1B)",
    )
    parser.add_argument(
        "--swapped-keys",
        type=int,
        metavar="TOKENS",
        help="keep the keys of longer documents of up to TOKENS tokens in host memory, as with --hdp-swapped-keys (0)",
    )
    add_option(parser, "--host-memory-gb", note=f"for keys, with --slices {AUTO} (default: 0)")
    add_option(parser, "--link-gb-per-second")
    add_costs(parser)


def cost_of_options(args: argparse.Namespace) -> ModelCost:
    """Return the costs in ``--cost-file``, or of a 7B model on ``--device``. Raises ValueError for a bad option."""
    path: Path | None = args.cost_file
    check_device(args.device)
    return device_cost(args.device or DEFAULT_DEVICE) if path is None else read_cost(path)


def setup_of_options(args: argparse.Namespace, cost: ModelCost, longest: int) -> Setup:
    """Return the setup of ``bytescale plan`` or ``bytescale simulate``; by default keys are kept as in training.

    Args:
        args: options of the command.
        cost: costs of the model.
        longest: tokens of the longest document.

    Raises:
        ValueError: options that conflict, options that need slices or stages, or a missing budget.
    """
    cluster = Cluster(args.ranks, args.tokens_per_rank, args.ranks_per_node, speeds=args.speeds or ())
    setup = setup_of_cost(cost, args.pipeline_parallel, cluster, longest)
    setup = replace(setup, budget=_budget(args))
    if args.slices == AUTO:
        _check_auto(args)
        return replace(setup, slicing=AUTO)
    slicing = slicing_of_options(args)
    for flag, given in (("--device-memory-gb", args.device_memory_gb), ("--host-memory-gb", args.host_memory_gb)):
        if given is not None:
            raise ValueError(f"{flag} needs --slices {AUTO}")
    for flag, tokens in (("--kept-keys", args.kept_keys), ("--swapped-keys", args.swapped_keys)):
        if tokens is not None and (tokens < 0 or args.slices == 1):
            raise ValueError(f"{flag} {tokens} must be at least 0, and needs --slices of 2 or more")
    if args.eager and args.slices == 1:
        raise ValueError("--eager needs --slices of 2 or more")
    slicing = replace(slicing, swapped_tokens=args.swapped_keys or 0)
    kept = args.kept_keys
    if kept is None:
        kept = affordable_keys(setup, slicing) if slicing.num_slices > 1 else 0
    return replace(setup, slicing=replace(slicing, kept_tokens=kept))


def _budget(args: argparse.Namespace) -> Budget:
    """Return the budget of the options. Host memory is unlimited if ``--swapped-keys`` says which keys go there."""
    link = args.link_gb_per_second
    if not 0 < link < math.inf:
        raise ValueError(f"--link-gb-per-second {link:g} must be positive and finite")
    host = args.host_memory_gb or 0.0
    if not 0 <= host < math.inf:
        raise ValueError(f"--host-memory-gb {host:g} is not an amount of memory")
    return Budget(
        device_bytes=math.inf if args.device_memory_gb is None else args.device_memory_gb * 1e9,
        host_bytes=math.inf if args.swapped_keys else host * 1e9,
        link_bytes_per_second=link * 1e9,
    )


def _check_auto(args: argparse.Namespace) -> None:
    """Raise ValueError for options that conflict with ``--slices auto``, or for a missing budget."""
    if args.pipeline_parallel == 1:
        raise ValueError(f"--slices {AUTO} needs a pipeline: give --pipeline-parallel of 2 or more")
    if args.kept_keys is not None or args.swapped_keys is not None or args.eager:
        raise ValueError(f"--slices {AUTO} chooses --kept-keys, --swapped-keys and --eager itself: remove them")
    if args.device_memory_gb is None or not 0 < args.device_memory_gb < math.inf:
        raise ValueError(f"--slices {AUTO} needs --device-memory-gb, the memory of a device")
