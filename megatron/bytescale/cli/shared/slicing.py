"""The options of slices, which several subcommands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace

from bytescale_ext.plan.cost.model_cost import LINK_BYTES_PER_SECOND, ModelCost
from bytescale_ext.plan.cost.model_shape import key_value_bytes
from bytescale_ext.plan.evaluate.schedulers import equal_layers
from bytescale_ext.plan.evaluate.slicing_choice import SlicingChoice
from bytescale_ext.plan.memory.stage_memory import StageMemory
from bytescale_ext.plan.schedule.document_slices import affordable_tokens
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing
from megatron.bytescale.cli.shared.inputs import count
from megatron.bytescale.features.slices.flags import AUTO, slices_value


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
    """Add the options that ``slicing_of`` and ``choice_of`` read; the help of ``--slices`` ends with ``more``."""
    text = f"slices in which each stage runs a micro-batch, as --seq1f1b-slices (1); {AUTO}: the planner chooses"
    add_slices_arguments(parser, text + more, slices_value)
    parser.add_argument(
        "--device-memory-gb",
        type=float,
        metavar="G",
        help=f"with --slices {AUTO}: the most memory of a device, with model states",
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


def link_of(args: argparse.Namespace) -> float:
    """Return the bytes per second of ``--link-gb-per-second``. Raises ValueError for one that is not positive."""
    if not 0 < args.link_gb_per_second < math.inf:
        raise ValueError(f"--link-gb-per-second {args.link_gb_per_second:g} must be positive")
    return float(args.link_gb_per_second) * 1e9


def slicing_of(args: argparse.Namespace, cost: ModelCost) -> Slicing:
    """Return the slicing of the options; by default keys are kept as in training without recomputation.

    Raises:
        ValueError: fewer than 1 slice, or options that need slices or stages and have none.
    """
    slicing = slices_of(args)
    if args.slices == AUTO:
        return slicing
    for flag, given in (("--device-memory-gb", args.device_memory_gb), ("--host-memory-gb", args.host_memory_gb)):
        if given is not None:
            raise ValueError(f"{flag} needs --slices {AUTO}")
    for flag, tokens in (("--kept-keys", args.kept_keys), ("--swapped-keys", args.swapped_keys)):
        if tokens is not None and (tokens < 0 or args.slices == 1):
            raise ValueError(f"{flag} {tokens} must be at least 0, and needs --slices of 2 or more")
    if args.eager and args.slices == 1:
        raise ValueError("--eager needs --slices of 2 or more")
    slicing = replace(slicing, swapped_tokens=args.swapped_keys or 0)
    if args.kept_keys is not None:
        return replace(slicing, kept_tokens=args.kept_keys)
    key_bytes = key_value_bytes(cost.shape, cost.tensor_parallel)
    kept = affordable_tokens(args.stages, slicing, args.tokens_per_rank, cost.layer_bytes, key_bytes)
    return replace(slicing, kept_tokens=kept)


def choice_of(args: argparse.Namespace, cost: ModelCost, cluster: Cluster) -> SlicingChoice | None:
    """Return what chooses the slicing of each step, or None where the options give one.

    Raises:
        ValueError: options that do not fit ``--slices auto``, or a budget that is missing or too small.
    """
    if args.slices != AUTO:
        return None
    if args.stages == 1:
        raise ValueError(f"--slices {AUTO} needs a pipeline: give --stages of 2 or more")
    if args.kept_keys is not None or args.swapped_keys is not None or args.eager:
        raise ValueError(f"--slices {AUTO} chooses what --kept-keys, --swapped-keys and --eager set: remove them")
    if args.device_memory_gb is None or not 0 < args.device_memory_gb < math.inf:
        raise ValueError(f"--slices {AUTO} needs --device-memory-gb, the most memory of a device")
    host = args.host_memory_gb or 0.0
    if not 0 <= host < math.inf:
        raise ValueError(f"--host-memory-gb {host:g} is not an amount of memory")
    memory = StageMemory.of(cost, equal_layers(cost, args.stages), cluster)
    choice = SlicingChoice.within(memory, args.device_memory_gb * 1e9, host * 1e9)
    choice.check_fits(cost.forward + cost.backward, cluster.tokens_per_rank)
    return choice
