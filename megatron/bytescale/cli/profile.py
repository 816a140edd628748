"""``bytescale profile``: measure this model on this device and write its cost file."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bytescale_ext.plan.cost import CostModel, ModelCost
from bytescale_ext.profile import fitted_lengths

NAME = "profile"
HELP = "measure what this model's layers cost on this device, one GPU or CPU, and write a cost file"
EXAMPLE = "bytescale profile --output cost.json -- $TRAINING_FLAGS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this subcommand."""
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the cost file (replaced)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="the longest micro-batch to measure; N tokens must fit in memory (32768 on a GPU, 4096 on CPU)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="times each micro-batch runs; the least counts (%(default)s)",
    )
    parser.add_argument(
        "--ring-bytes-per-second",
        type=float,
        metavar="B",
        help="what a rank receives from another; default: measured between two GPUs, or two processes on CPU, and "
        "with a single GPU its copies to host memory",
    )
    parser.add_argument("--cpu", action="store_true", help="measure on CPU although there is a GPU")
    parser.add_argument("--json", action="store_true", help="print the costs and the predictions as JSON")
    parser.add_argument(
        "flags",
        nargs="*",
        metavar="-- FLAGS",
        help="after a --: the flags of the training command; those that cost a layer nothing (data, checkpoints, "
        "pipeline stages, ...) are ignored",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, fit, judge, write and print.

    Raises:
        ValueError: a flag that cannot be profiled, times that are noise, or an output that cannot be written.
    """
    _check(args)
    from megatron.bytescale import cpu

    on_cpu = cpu.install_if_wanted(["--cpu"] if args.cpu else args.flags) is not None
    begun = time.perf_counter()
    import torch

    try:
        with quiet():
            cost, found, rank = measure(args, on_cpu)
    except torch.OutOfMemoryError:
        raise ValueError("a micro-batch does not fit in the GPU's memory; give a smaller --max-tokens") from None
    if rank:  # of torchrun's processes the first one tells
        return 0
    from bytescale_ext.cost_file import write_cost

    write_cost(args.output, cost)
    if args.json:
        print(json.dumps({"cost": cost.to_json(), "unseen": [_as_json(one) for one in found]}, indent=2))
        return 0
    print(report_text(cost, found))
    print(f"wrote {args.output} after {time.perf_counter() - begun:.0f} s")
    return 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Megatron lists all its arguments on standard output, and each model's parameters in its log."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def measure(args: argparse.Namespace, on_cpu: bool) -> tuple[ModelCost, list[Any], int]:
    """(costs, predictions of lengths that the fit did not see, process rank)."""
    # Here and not above: importing Megatron takes seconds, and --help should not.
    import torch

    from bytescale_ext import profile
    from megatron.bytescale.training.profile import kept_bytes_per_token, prepare, time_packs

    max_tokens = (4096 if on_cpu else 32768) if args.max_tokens is None else args.max_tokens
    fitted, unseen = fitted_lengths(max_tokens), profile.unseen_lengths(max_tokens)
    subject = prepare([*args.flags, *(["--cpu"] if args.cpu else [])], max_tokens, on_cpu)
    timings = time_packs(subject, [*fitted, *unseen], args.repeats)
    seen = [timing for timing in timings if timing.lengths in fitted]
    fits = profile.fit_timings(seen)
    found = profile.predictions(fits, [timing for timing in timings if timing.lengths not in fitted])
    kept = kept_bytes_per_token(subject, max_tokens // 4)
    rank = int(subject.args.rank)
    torch.distributed.destroy_process_group()
    rate, how = ring_rate(args.ring_bytes_per_second, on_cpu) if rank == 0 else (1.0, "")
    recompute = subject.args.recompute_granularity
    assert subject.runtime.kernel is not None
    source = (
        f"bytescale profile, torch {torch.__version__}, attention kernel {subject.runtime.kernel.name}: "
        f"{len(seen)} micro-batches of up to {max_tokens} tokens in models of {profile.LAYERS[0]} and "
        f"{profile.LAYERS[1]} layers{f', with {recompute} recompute' if recompute else ''}; other lengths predicted "
        f"with an error of {profile.errors_text(found)}; ring {how}, {rate / 1e9:.3g} GB/s"
    )
    where = (subject.device, subject.dtype, subject.tensor_parallel, source)
    return profile.model_cost(fits, subject.shape, subject.ring_seconds(rate), kept, *where), found, rank


def ring_rate(given: float | None, on_cpu: bool) -> tuple[float, str]:
    """Bytes per second between ranks of a ring, and how that is known."""
    import torch

    from bytescale_ext.profile_ring import bytes_per_second_of_two_processes, host_copy_bytes_per_second

    if given is not None:
        return given, "as given with --ring-bytes-per-second"
    if on_cpu or torch.cuda.device_count() > 1:
        where = "processes on CPU" if on_cpu else "GPUs of this machine"
        return bytes_per_second_of_two_processes(not on_cpu), f"measured between two {where}"
    return host_copy_bytes_per_second(), "taken from copies to host memory, as there is one GPU"


def report_text(cost: ModelCost, found: Sequence[Any]) -> str:
    """The costs and how well they predict, for a person."""
    from bytescale_ext.profile import errors_text, prediction_table

    rows = [
        ("attention, ps per token squared", "a", 1e12),
        ("linear, ns per token", "b", 1e9),
        ("ring, ns per token received", "c", 1e9),
        ("fixed, us per micro-batch", "g", 1e6),
    ]
    lines = [f"{cost.device}, {cost.dtype}", "", f"{'one layer':<34} {'forward':>12} {'backward':>12}"]
    for name, key, unit in rows:
        lines.append(f"  {name:<32} {_number(cost.forward, key, unit)} {_number(cost.backward, key, unit)}")
    head = (1e9 * cost.head_forward, 1e9 * cost.head_backward)
    lines.append(f"{'embedding, output layer and loss':<34}")
    lines.append(f"  {'ns per token':<32} {head[0]:12,.2f} {head[1]:12,.2f}")
    lines.append(f"{'kept until the backward pass':<34} {'':>12} {'recompute':>12}")
    lines.append(f"  {'bytes per token and layer':<32} {cost.layer_bytes:12,.0f} {cost.recompute_bytes:12,.0f}")
    lines += ["", "micro-batches that the fit did not see, forward and backward:", prediction_table(found)]
    lines.append(f"error: {errors_text(found)}")
    lines += ["", cost.source]
    return "\n".join(lines)


def _number(cost: CostModel, key: str, unit: float) -> str:
    return f"{unit * getattr(cost, key):12,.2f}"


def _as_json(found: Any) -> dict[str, Any]:
    return {
        "num_layers": found.num_layers,
        "lengths": list(found.lengths),
        "measured_seconds": found.measured_seconds,
        "predicted_seconds": found.predicted_seconds,
        "error": found.error,
    }


def _check(args: argparse.Namespace) -> None:
    """Find out before anything is set up what would spoil the measurement."""
    if not args.flags:
        raise ValueError("no model: give the flags of the training command after a --")
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: give at least 1")
    if args.ring_bytes_per_second is not None and not 0 < args.ring_bytes_per_second < float("inf"):
        raise ValueError(f"--ring-bytes-per-second {args.ring_bytes_per_second:g}: give a positive number")
    if args.max_tokens is not None:
        fitted_lengths(args.max_tokens)
    folder = args.output.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or args.output.is_dir():
        raise ValueError(f"--output {args.output} cannot be written; choose a file in a folder that is there")
