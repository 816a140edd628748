"""The options of slices, which several subcommands share."""

from __future__ import annotations

import argparse
from dataclasses import replace

from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import key_value_bytes
from bytescale_ext.plan.schedule.document_slices import affordable_tokens
from bytescale_ext.plan.step.sizes import Slicing


def add_slices_arguments(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--slices`` with this help, and ``--eager``; ``slices_of`` reads them."""
    parser.add_argument("--slices", type=int, default=1, metavar="K", help=text)
    parser.add_argument(
        "--eager", action="store_true", help="stages run two forwards ahead of the next one, as --seq1f1b-eager"
    )


def slices_of(args: argparse.Namespace) -> Slicing:
    """Return the slices of the options, without kept keys. Raises ValueError for fewer than 1."""
    if args.slices < 1:
        raise ValueError(f"--slices {args.slices} must be at least 1")
    return Slicing(args.slices, eager=args.eager)


def add_slicing_arguments(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add ``--slices``, whose help ends with ``more``, ``--eager`` and ``--kept-keys``; ``slicing_of`` reads them."""
    add_slices_arguments(parser, f"slices in which each stage runs a micro-batch, as --seq1f1b-slices (1){more}")
    parser.add_argument(
        "--kept-keys",
        type=int,
        metavar="TOKENS",
        help="keep the keys of documents of up to TOKENS tokens from slice to slice, as --hdp-kept-keys (default: as "
        "long as that takes no more memory than 1F1B)",
    )


def slicing_of(args: argparse.Namespace, cost: ModelCost) -> Slicing:
    """Return the slicing of the options; by default keys are kept as in training without recomputation.

    Raises:
        ValueError: fewer than 1 slice, or options that need slices or stages and have none.
    """
    slicing = slices_of(args)
    if args.slices > 1 and args.stages == 1:
        raise ValueError(f"--slices {args.slices} needs a pipeline: give --stages of 2 or more")
    if args.kept_keys is not None and (args.kept_keys < 0 or args.slices == 1):
        raise ValueError(f"--kept-keys {args.kept_keys} must be at least 0, and needs --slices of 2 or more")
    if args.eager and args.slices == 1:
        raise ValueError("--eager needs --slices of 2 or more")
    if args.kept_keys is not None:
        return replace(slicing, kept_tokens=args.kept_keys)
    key_bytes = key_value_bytes(cost.shape, cost.tensor_parallel)
    kept = affordable_tokens(args.stages, slicing, args.tokens_per_rank, cost.layer_bytes, key_bytes)
    return replace(slicing, kept_tokens=kept)
