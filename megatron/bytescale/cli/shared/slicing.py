"""The options of slices, which several subcommands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace

from bytescale_ext.plan.cost.model_cost import LINK_BYTES_PER_SECOND, ModelCost
from bytescale_ext.plan.setup.memory import affordable_keys
from bytescale_ext.plan.setup.setup import AUTO, Budget, Setup, setup_of_cost
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing
from megatron.bytescale.cli.shared.inputs import count
from megatron.bytescale.features.slices.flags import slices_value


def add_slices_arguments(parser: argparse.ArgumentParser, text: str, kind: Callable[[str], int | str] = count) -> None:
    """Add ``--slices`` with this help and type, and ``--eager``; ``slices_of`` reads them."""
    parser.add_argument("--slices", type=kind, default=1, metavar="K", help=text)
    parser.add_argument(
        "--eager", action="store_true", help="stages run two forwards ahead of the next one, as --seq1f1b-eager"
    )


def slices_of(args: argparse.Namespace) -> Slicing:
    """Return the slices of the options, without kept keys. Raises ValueError for fewer than 1."""
    if args.slices == AUTO:
        return ONE_SLICE
    if args.slices < 1:
        raise ValueError(f"--slices {args.slices} must be at least 1")
    return Slicing(args.slices, eager=args.eager)


def add_slicing_arguments(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add the options that ``setup_of_options`` reads; the help of ``--slices`` ends with ``more``."""
    text = f"slices in which each stage runs a micro-batch, as --seq1f1b-slices (1); {AUTO}: the planner chooses"
    add_slices_arguments(parser, text + more, slices_value)
    parser.add_argument(
        "--device-memory-gb",
        type=float,
        metavar="G",
        help=f"with --slices {AUTO}: memory of a device, all of it; model states are subtracted",
    )
    parser.add_argument(
        "--kept-keys",
        type=int,
        metavar="TOKENS",
        help="keep the keys of documents of up to TOKENS tokens from slice to slice, as --hdp-kept-keys (default: as "
        "long as that takes no more memory than 1F1B)",
    )
    parser.add_argument(
        "--swapped-keys",
        type=int,
        metavar="TOKENS",
        help="keep the keys of longer documents of up to TOKENS tokens in host memory, as --hdp-swapped-keys (0)",
    )
    parser.add_argument(
        "--host-memory-gb",
        type=float,
        metavar="G",
        help=f"with --slices {AUTO}: the host memory of a device in which keys may be kept (0)",
    )
    parser.add_argument(
        "--link-gb-per-second",
        type=float,
        default=LINK_BYTES_PER_SECOND / 1e9,
        metavar="B",
        help="speed of the link between a device and host memory, one way (%(default)g)",
    )


def setup_of_options(args: argparse.Namespace, cost: ModelCost, longest: int) -> Setup:
    """Return the setup of ``bytescale plan`` or ``bytescale simulate``; by default keys are kept as in training.

    Args:
        args: the options.
        cost: costs of the model.
        longest: tokens of the longest document.

    Raises:
        ValueError: options that conflict, or that need slices or stages and have none; a budget that is missing.
    """
    cluster = Cluster(args.ranks, args.tokens_per_rank, args.ranks_per_node)
    setup = setup_of_cost(cost, args.stages, cluster, longest)
    setup = replace(setup, budget=_budget(args))
    if args.slices == AUTO:
        _check_auto(args)
        return replace(setup, slicing=AUTO)
    slicing = slices_of(args)
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
    """Return memory and links; keys that options swap have all the host memory that they need."""
    link = args.link_gb_per_second
    if not 0 < link < math.inf:
        raise ValueError(f"--link-gb-per-second {link:g} must be positive")
    host = args.host_memory_gb or 0.0
    if not 0 <= host < math.inf:
        raise ValueError(f"--host-memory-gb {host:g} is not an amount of memory")
    return Budget(
        device_bytes=math.inf if args.device_memory_gb is None else args.device_memory_gb * 1e9,
        host_bytes=math.inf if args.swapped_keys else host * 1e9,
        link_bytes_per_second=link * 1e9,
    )


def _check_auto(args: argparse.Namespace) -> None:
    """Raise ValueError for options that do not fit ``--slices auto``, or a budget that is missing."""
    if args.stages == 1:
        raise ValueError(f"--slices {AUTO} needs a pipeline: give --stages of 2 or more")
    if args.kept_keys is not None or args.swapped_keys is not None or args.eager:
        raise ValueError(f"--slices {AUTO} chooses what --kept-keys, --swapped-keys and --eager set: remove them")
    if args.device_memory_gb is None or not 0 < args.device_memory_gb < math.inf:
        raise ValueError(f"--slices {AUTO} needs --device-memory-gb, the memory of a device")
