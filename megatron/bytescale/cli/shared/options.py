"""The options that several subcommands have: one name, one type and one help text each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bytescale_ext.measure.devices import DEFAULT_DEVICE, DEVICES
from bytescale_ext.plan.activation.policies import POLICIES
from bytescale_ext.plan.cost.model_cost import LINK_BYTES_PER_SECOND
from bytescale_ext.plan.evaluate.length_samplers import SAMPLERS
from megatron.bytescale.cli.shared.inputs import count, seed, size, speeds_value

Parser = argparse.ArgumentParser | argparse._MutuallyExclusiveGroup


@dataclass(frozen=True)
class SharedOption:
    """An option that several subcommands have.

    Attributes:
        kind: conversion of its text.
        metavar: name of its value in the help.
        text: its help, which a subcommand may extend.
        default: value without the option; None if there is none, or if it depends on the subcommand.
    """

    kind: Callable[[str], object]
    metavar: str
    text: str
    default: float | str | None = None


SHARED_OPTIONS: Final[Mapping[str, SharedOption]] = {
    "--model-flags": SharedOption(str, "'FLAGS'", "Megatron's flags of the model in one quoted string"),
    "--cost-file": SharedOption(Path, "F.json", "costs of the model, measured by bytescale profile"),
    "--lengths": SharedOption(
        Path, "FILE", "document lengths: a Megatron index (.idx) or a one-dimensional array of integers (.npy)"
    ),
    "--sampler": SharedOption(str, "NAME", f"draw document lengths from a distribution: {', '.join(SAMPLERS)}"),
    "--ranks": SharedOption(count, "N", "number of ranks"),
    "--ranks-per-node": SharedOption(count, "N", "ranks of a node"),
    "--speeds": SharedOption(
        speeds_value, "S,...", "speeds of the ranks, relative to the costs; SxN is N ranks of speed S, as in 1x8,0.5x8"
    ),
    "--optimizer-ranks": SharedOption(
        count, "N", "ranks that share the optimizer states, as with --use-distributed-optimizer", 1
    ),
    "--tensor-parallel": SharedOption(count, "T", "tensor-parallel ranks of each layer", 1),
    "--pipeline-parallel": SharedOption(count, "P", "pipeline stages", 1),
    "--micro-batches": SharedOption(count, "M", "micro-batches of a rank in each step", 1),
    "--tokens-per-rank": SharedOption(size, "C", "the most tokens of a micro-batch on one rank"),
    "--seq-length": SharedOption(size, "S", "the most tokens of a sequence"),
    "--device-memory-gb": SharedOption(float, "G", "whole memory of a device, in GB"),
    "--host-memory-gb": SharedOption(float, "G", "host memory that each process may use, in GB"),
    "--link-gb-per-second": SharedOption(
        float, "B", "GB/s of the link between a device and host memory, one way", LINK_BYTES_PER_SECOND / 1e9
    ),
    "--activation-policy": SharedOption(str, "P", f"activation policy of the training: {', '.join(POLICIES)}"),
    "--chunked-cross-entropy": SharedOption(size, "TOKENS", "compute logits for TOKENS tokens at a time"),
    "--json-key": SharedOption(str, "KEY", "key of the text in .jsonl files", "text"),
    "--seed": SharedOption(seed, "N", "seed of random numbers", 1234),
}


def add_option(
    parser: Parser, name: str, *, note: str = "", default: float | str | None = None, required: bool = False
) -> None:
    """Add a row of ``SHARED_OPTIONS``.

    Args:
        parser: parser of the subcommand, or an exclusive group of its options.
        name: name of the option.
        note: text that follows the shared help.
        default: default value, if the row does not have the right one.
        required: whether the subcommand needs the option.
    """
    row = SHARED_OPTIONS[name]
    value = None if required else row.default if default is None else default
    text = row.text + (f"; {note}" if note else "")
    shown = "" if value is None else f" (default: {value if isinstance(value, str) else format(value, 'g')})"
    parser.add_argument(
        name,
        type=row.kind,
        metavar=row.metavar,
        default=value,
        required=required,
        help=text + shown,
    )


def add_lengths(parser: argparse.ArgumentParser, required: bool = False, note: str = "") -> None:
    """Add the exclusive options ``--lengths`` and ``--sampler``; ``check_sampler`` checks the latter."""
    group = parser.add_mutually_exclusive_group(required=required)
    add_option(group, "--lengths", note=note)
    add_option(group, "--sampler")


def check_sampler(name: str | None) -> None:
    """Raise ValueError if ``--sampler`` names no distribution."""
    if name is not None and name not in SAMPLERS:
        raise ValueError(f"--sampler {name} is unknown; choose one of {', '.join(SAMPLERS)}")


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add the exclusive options ``--cost-file`` and ``--device``; ``check_device`` checks the latter."""
    costs = parser.add_mutually_exclusive_group()
    add_option(costs, "--cost-file")
    costs.add_argument(
        "--device",
        metavar="NAME",
        help=f"device whose shipped costs are scaled to the model: {', '.join(DEVICES)} (default: {DEFAULT_DEVICE})",
    )


def check_device(name: str | None) -> None:
    """Raise ValueError if ``--device`` names no device with shipped costs."""
    if name is not None and name not in DEVICES:
        raise ValueError(f"--device {name} is unknown; choose one of {', '.join(DEVICES)}, or give --cost-file")


def add_rates(parser: argparse.ArgumentParser) -> None:
    """Add ``--tflops``, three rates in place of measured costs."""
    parser.add_argument(
        "--tflops",
        type=float,
        nargs=3,
        metavar=("GEMM", "ATTENTION", "BACKWARD"),
        help="without --cost-file: TFLOP/s of matrix products, attention forward and attention backward "
        f"(default: the shipped costs of {DEFAULT_DEVICE}, as in training)",
    )


def check_rates(rates: Sequence[float] | None) -> None:
    """Raise ValueError if a rate of ``--tflops`` is not positive and finite."""
    if rates is not None and not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"--tflops must be positive and finite, got {' '.join(map(str, rates))}")


def add_plot(parser: argparse.ArgumentParser, content: str) -> None:
    """Add ``--plot``, the file of a picture of ``content``."""
    parser.add_argument("--plot", type=Path, metavar="F.png", help=f"draw {content} (.png, .svg or .pdf)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_trust_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust-checkpoint``."""
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="load checkpoints with pickled classes that Megatron's checkpoints do not need; they can run code",
    )


def add_cpu(parser: argparse.ArgumentParser) -> None:
    """Add ``--cpu``."""
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
